"""The tail's operators on CPU: `native.cpp`, compiled by the machine's own compiler when somebody first asks for it.

Compiled with no more than a C++ compiler, in about a second, into a cache of the user's: no headers of torch or Python,
so nothing that changes with their versions. Called through ctypes, which lets other threads run meanwhile.

Note [one runtime]: two OpenMP runtimes in a process are two pools of threads that wait for each other in busy loops.
So the kernels are linked with none: they are given the entry of the runtime that torch itself calls, found the way the
dynamic linker has found it for torch (what is global first, then what libtorch depends on).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from struct import pack

import torch
from torch import Tensor

from halfstep.kernels.ops import FORMS, LIBRARY

__all__ = ["why_not"]

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
SHARED = ("-shared", "-fPIC")
COMPILERS = ("g++", "clang++", "c++")
ALONE = {"update": 100_000, "norms": 400_000, "exponents": 50_000}
"""Up to so many elements the calling thread works alone: waking the others (5 us and more) costs what it gains."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int16: 3, torch.float64: 4}
FORM_CODES = {form: code for code, form in enumerate(FORMS)}


# ------------------------------------------------------------------ compiling


class Unavailable(Exception):
    """Why there are no compiled kernels, in one sentence."""


def why_not() -> str:
    """Return why the compiled kernels cannot be used, in one sentence; "" if they can, and then they are registered.

    Compiles them if no process of this user has done so on a machine like this.
    """
    if os.environ.get("HALFSTEP_NATIVE") == "0":
        return "the environment variable HALFSTEP_NATIVE is 0"
    with _LOCK:
        return _registered()


_LOCK = threading.Lock()


@cache
def _registered() -> str:
    try:
        kernels = _Kernels(_library())
    except Unavailable as reason:
        return str(reason)
    except OSError as error:  # a full disk, a file taken away
        return f"the kernels could not be compiled: {error}"
    for name in ("norms", "judge", "adam_", "sgd_", "lion_", "exponents_"):
        LIBRARY.impl(name, getattr(kernels, name), "CPU")
    return ""


def _compiler() -> str:
    named = os.environ.get("CXX", "").strip()
    if named:
        found = shutil.which(named)
        if found is None:
            raise Unavailable(f"the environment variable CXX names {named!r}, which is no program here")
        return found
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise Unavailable(f"no C++ compiler was found (looked for {', '.join(COMPILERS)}; CXX can name one)")


def _machine() -> str:
    """Return what a binary for this CPU depends on."""
    kinds = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _compiled() -> Path:
    """Return the path of the compiled kernels; compile them if they are not in the cache."""
    if sys.platform not in ("linux", "darwin") or sys.maxsize < 2**32 or sys.byteorder != "little":
        raise Unavailable(f"kernels are not compiled on this platform ({sys.platform}, {platform.machine()})")
    compiler = _compiler()
    arm = platform.machine().lower() in ("aarch64", "arm64")
    flags = (*FLAGS, "-mcpu=native" if arm else "-march=native", *SHARED)
    version = _run([compiler, "--version"]).stdout
    key = hashlib.sha256("\0".join((SOURCE.read_text(encoding="utf-8"), *flags, version, _machine())).encode())
    path = _folder() / f"native-{key.hexdigest()[:24]}.so"
    if path.exists():
        return path
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        done = _run([compiler, *flags, "-o", temporary, str(SOURCE)])
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise Unavailable(f"{compiler} could not compile the kernels: {lines[0].strip()}")
        os.replace(temporary, path)  # whole or not there, however many processes compile
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} could not be run: {error}") from error


def _folder() -> Path:
    """Return a folder for compiled kernels that only this user can write to."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "halfstep"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    return Path(_temporary().name)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that lasts as long as this process."""
    return tempfile.TemporaryDirectory(prefix="halfstep-")


def _library() -> ctypes.CDLL:
    path = _compiled()
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # damaged: made once more
        path.unlink(missing_ok=True)
    return ctypes.CDLL(str(_compiled()))


def _threads() -> tuple[int, int, int]:
    """Return the addresses of what `native.cpp` needs to run on torch's threads, see Note [one runtime]; 0: one thread.

    Raises:
        Unavailable: they were not found, and one thread would be slower than torch.
    """
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    libtorch = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    for name in (None, str(libtorch)):
        try:
            library = ctypes.CDLL(name)
            entries = [ctypes.cast(getattr(library, entry), ctypes.c_void_p).value or 0 for entry in names]
        except (OSError, AttributeError):
            continue
        return entries[0], entries[1], entries[2]
    if sys.platform == "darwin":
        return 0, 0, 0  # its compilers' runtimes have no such entry, and one thread comes near the memory's speed
    raise Unavailable("torch's OpenMP runtime was not found, and on one thread the kernels would be slower than torch")


# ------------------------------------------------------------------ calling


class _Kernels:
    """The operators, with `native.cpp`'s functions behind them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        text, number, address = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p
        self._runtime = _threads()
        self._norms, self._judge = library.halfstep_norms, library.halfstep_judge
        self._exponents = library.halfstep_exponents
        self._adam, self._sgd, self._lion = library.halfstep_adam, library.halfstep_sgd, library.halfstep_lion
        self._norms.argtypes = self._exponents.argtypes = (address, text, number, text)
        self._judge.argtypes = (address, number, address, text, address, address, address)
        for update in (self._adam, self._sgd, self._lion):
            update.argtypes = (text, text)
        for function in (self._norms, self._judge, self._adam, self._sgd, self._lion, self._exponents):
            function.restype = None

    def _team(self, work: str, sizes: Sequence[int]) -> tuple[int, int, int, int]:
        """Return who does the work, `native.cpp`'s `Threads`."""
        return torch.get_num_threads() if sum(sizes) > ALONE[work] else 1, *self._runtime

    def _threads(self, work: str, tensors: Sequence[Tensor]) -> bytes:
        return pack("4q", *self._team(work, [t.numel() for t in tensors]))

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        count = len(gradients)
        norms = torch.empty(count, dtype=torch.float32, device="cpu")
        self._norms(norms.data_ptr(), _columns(gradients), count, self._threads("norms", gradients))
        return norms

    def exponents_(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        if len(rows) != len(tensors) or not rows.is_contiguous():
            raise ValueError(f"{len(tensors)} tensors need as many rows, contiguous; got {tuple(rows.shape)}")
        dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        self._exponents(rows.data_ptr(), _columns(dense), len(dense), self._threads("exponents", dense))

    def judge(self, norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
        norms = norms.contiguous()
        norm, bad, factor = norms.new_empty(()), norms.new_empty((), dtype=torch.bool), norms.new_empty(())
        clip = None if clip_norm is None else pack("f", clip_norm)
        at = None if divisor is None else divisor.data_ptr()
        self._judge(norms.data_ptr(), norms.numel(), at, clip, norm.data_ptr(), bad.data_ptr(), factor.data_ptr())
        return norm, bad, factor

    def adam_(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[Tensor],
        gradients: Sequence[Tensor],
        factor: Tensor,
        bad: Tensor,
        draws: Tensor | None,
        start: int,
        form: str,
        rate: Tensor | None,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        maximize: bool,
    ) -> None:
        columns, team = self._table(weights, beside, first, second, steps, gradients)
        flags = (decoupled, maximize, False)
        given = _job(len(weights), team, form, start, flags, factor, bad, draws, rate)
        self._adam(given + pack("5d", lr, beta1, beta2, eps, weight_decay), columns)

    def sgd_(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        factor: Tensor,
        bad: Tensor,
        draws: Tensor | None,
        start: int,
        form: str,
        rate: Tensor | None,
        lr: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
        maximize: bool,
    ) -> None:
        columns, team = self._table(weights, beside, momenta, (), (), gradients)
        flags = (False, maximize, nesterov)
        given = _job(len(weights), team, form, start, flags, factor, bad, draws, rate)
        self._sgd(given + pack("5d", lr, momentum, 0.0, 0.0, weight_decay), columns)

    def lion_(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        momenta: Sequence[Tensor],
        gradients: Sequence[Tensor],
        factor: Tensor,
        bad: Tensor,
        draws: Tensor | None,
        start: int,
        form: str,
        rate: Tensor | None,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        maximize: bool,
    ) -> None:
        columns, team = self._table(weights, beside, momenta, (), (), gradients)
        flags = (True, maximize, False)
        given = _job(len(weights), team, form, start, flags, factor, bad, draws, rate)
        self._lion(given + pack("5d", lr, beta1, beta2, 0.0, weight_decay), columns)

    def _table(
        self,
        weights: Sequence[Tensor],
        beside: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> tuple[bytes, tuple[int, int, int, int]]:
        """Return `native.cpp`'s columns of `Parameter`, and who works on them."""
        count = len(weights)
        sizes = [t.numel() for t in weights]
        if sizes != [t.numel() for t in gradients]:
            raise ValueError(f"gradients and weights differ in size: {[t.numel() for t in gradients]} and {sizes}")
        columns = list(sizes)
        absent = [0] * count
        for tensors in (weights, beside, first, second, gradients):
            columns += [TYPES[t.dtype] for t in tensors] if tensors else absent
        for tensors in (weights, beside, first, second, steps, gradients):
            columns += map(_address, tensors) if tensors else absent
        return pack(f"{len(columns)}q", *columns), self._team("update", sizes)


_address = Tensor.data_ptr


def _columns(tensors: Sequence[Tensor]) -> bytes:
    """Return sizes, types and addresses."""
    sizes, types = [t.numel() for t in tensors], [TYPES[t.dtype] for t in tensors]
    return pack(f"{3 * len(tensors)}q", *sizes, *types, *map(_address, tensors))


def _job(
    count: int,
    team: tuple[int, int, int, int],
    form: str,
    start: int,
    flags: tuple[bool, bool, bool],
    factor: Tensor,
    bad: Tensor,
    draws: Tensor | None,
    rate: Tensor | None,
) -> bytes:
    """Return the head of `native.cpp`'s `Job`."""
    wide = rate is not None and rate.dtype is torch.float64
    addresses = (factor.data_ptr(), bad.data_ptr(), *(0 if t is None else t.data_ptr() for t in (draws, rate)))
    return pack("15q", count, *team, FORM_CODES[form], start, wide, *flags, *addresses)
