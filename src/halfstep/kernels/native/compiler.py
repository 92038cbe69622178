"""Find `kernels.cpp` compiled: shipped in the wheel, or in the user's cache; else compile it into the cache.

A wheel ships a portable library for each instruction set of its platform (`PORTABLE`), so that it needs no compiler
where it is installed; `setup.py` builds them with `ship` and loads this file alone, so it imports no torch. A source
tree, an editable installation and a wheel without them compile for the machine at hand, at first use.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
INCLUDED = ("exponents.h", "formats.h", "loss.h", "norms.h", "threads.h", "updates.h")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
SHARED = ("-shared", "-fPIC")
COMPILERS = ("g++", "clang++", "c++")

PORTABLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
        "avx2": ("-mavx2", "-mfma"),  # none below: without FMA the loss kernels would have other bits
    },
    "arm64": {"neon": ("-march=armv8-a",)},
}
"""Machine -> instruction set, the best first -> flags: what `torch.backends.cpu.get_cpu_capability` requires for it."""


class Unavailable(Exception):
    """Why there are no compiled kernels, in one sentence."""


def _compiler() -> str:
    named = os.environ.get("CXX", "").strip()
    found = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
    if found is not None:
        return found
    if named:
        raise Unavailable(f"the environment variable CXX names {named!r}, which is no program here")
    raise Unavailable(f"no C++ compiler was found (looked for {', '.join(COMPILERS)}; CXX can name one)")


def _machine() -> str:
    """Return what a binary for this CPU depends on."""
    kinds = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _texts() -> list[str]:
    return [file.read_text(encoding="utf-8") for file in (SOURCE, *map(SOURCE.with_name, INCLUDED))]


def _arch() -> str:
    name = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(name, name)


def _check_platform() -> None:
    if sys.platform not in ("linux", "darwin") or sys.maxsize < 2**32 or sys.byteorder != "little":
        raise Unavailable(f"kernels are not compiled on this platform ({sys.platform}, {platform.machine()})")


def compiled() -> Path:
    """Return the path of the kernels compiled for this machine; compile them if they are not in the cache."""
    _check_platform()
    compiler = _compiler()
    flags = (*FLAGS, "-mcpu=native" if _arch() == "arm64" else "-march=native", *SHARED)
    version = _run([compiler, "--version"]).stdout
    key = hashlib.sha256("\0".join((*_texts(), *flags, version, _machine())).encode())
    path = cache_folder() / f"native-{key.hexdigest()[:24]}.so"
    if not path.exists():
        compile_to(path, [compiler, *flags, str(SOURCE)])
    return path


def compile_to(path: Path, command: Sequence[str], what: str = "the kernels") -> None:
    """Make a library at `path` by the command of a compiler; errors name `what` it is of."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        done = _run([*command, "-o", temporary])
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise Unavailable(f"{command[0]} could not compile {what}: {lines[0].strip()}")
        os.replace(temporary, path)  # whole or not there, however many processes compile
    finally:
        Path(temporary).unlink(missing_ok=True)


def _portable() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the libraries a wheel for this platform ships: instruction set -> file name, flags."""
    found = {}
    oldest = ("-mmacosx-version-min=11.0",) if sys.platform == "darwin" else ()
    for name, chosen in PORTABLE.get(_arch(), {}).items():
        flags = (*FLAGS, *chosen, "-DHALFSTEP_PORTABLE", *oldest, *SHARED)
        key = hashlib.sha256("\0".join((*_texts(), *flags)).encode())
        found[name] = f"portable-{name}-{key.hexdigest()[:16]}.so", flags
    return found


def ship(folder: Path) -> list[Path]:
    """Compile the portable libraries for this platform into the folder of this file's copy in a wheel; return them."""
    _check_platform()
    libraries = _portable()
    if not libraries:
        raise Unavailable(f"there are no portable kernels for {platform.machine()}")
    compiler = _compiler()
    for name, flags in libraries.values():
        compile_to(folder / name, [compiler, *flags, str(SOURCE)])
        (folder / name).chmod(0o755)
    return [folder / name for name, _ in libraries.values()]


def shipped(capability: str) -> tuple[Path, str] | None:
    """Return the best shipped library that this CPU can run and that was built from these sources, and its name."""
    libraries = _portable()
    usable = list(libraries)
    if "neon" not in libraries:
        usable = usable[usable.index(capability.lower()) :] if capability.lower() in usable else []
    for name in usable:
        path = SOURCE.with_name(libraries[name][0])
        if path.exists():
            return path, name
    return None


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} could not be run: {error}") from error


def cache_folder() -> Path:
    """Return a folder for compiled libraries that only this user can write to."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "halfstep"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass  # then they are compiled for this process alone
    return Path(_temporary().name)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="halfstep-")


def library(capability: str) -> tuple[ctypes.CDLL, str]:
    """Return the compiled kernels, and where they are from, in words that follow 'CPU kernels: '.

    They are the shipped ones, except with HALFSTEP_NATIVE=build, else those compiled here.
    """
    there = None if os.environ.get("HALFSTEP_NATIVE") == "build" else shipped(capability)
    if there is not None:
        path, name = there
        try:
            return ctypes.CDLL(str(path)), f"shipped, for {name}"
        except OSError:  # of another C library, such as musl: compiled here
            pass
    path = compiled()
    try:
        return ctypes.CDLL(str(path)), "compiled on this machine"
    except OSError:  # damaged: compiled again
        path.unlink(missing_ok=True)
    return ctypes.CDLL(str(compiled())), "compiled on this machine"
