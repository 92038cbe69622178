"""Find the compiled `kernels.cpp` in the user's cache, or compile it into the cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["Unavailable", "cache_folder", "compiled", "library"]

SOURCE = Path(__file__).with_name("kernels.cpp")
INCLUDED = ("exponents.h", "formats.h", "loss.h", "norms.h", "threads.h", "updates.h")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
SHARED = ("-shared", "-fPIC")
COMPILERS = ("g++", "clang++", "c++")


class Unavailable(Exception):
    """Why there are no compiled kernels, in one sentence."""


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


def compiled() -> Path:
    """Return the path of the compiled kernels; compile them if they are not in the cache."""
    if sys.platform not in ("linux", "darwin") or sys.maxsize < 2**32 or sys.byteorder != "little":
        raise Unavailable(f"kernels are not compiled on this platform ({sys.platform}, {platform.machine()})")
    compiler = _compiler()
    arm = platform.machine().lower() in ("aarch64", "arm64")
    flags = (*FLAGS, "-mcpu=native" if arm else "-march=native", *SHARED)
    version = _run([compiler, "--version"]).stdout
    texts = [file.read_text(encoding="utf-8") for file in (SOURCE, *map(SOURCE.with_name, INCLUDED))]
    key = hashlib.sha256("\0".join((*texts, *flags, version, _machine())).encode())
    path = cache_folder() / f"native-{key.hexdigest()[:24]}.so"
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


def cache_folder() -> Path:
    """Return a folder for compiled kernels that only this user can write to."""
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
    """Return a folder that lasts as long as this process."""
    return tempfile.TemporaryDirectory(prefix="halfstep-")


def library() -> ctypes.CDLL:
    """Return the compiled kernels, loaded.

    Raises:
        Unavailable: there is no compiler, or none that can compile them.
    """
    path = compiled()
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # damaged: compiled again
        path.unlink(missing_ok=True)
    return ctypes.CDLL(str(compiled()))
