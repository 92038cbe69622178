"""Building: the C++ libraries of the test devices, compiled against the installed torch on first use."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import halfstep as hs


class DeviceError(hs.HalfstepError):
    """The library of a test device cannot be built or loaded, or a process was started without it."""


def missing(what: str) -> str:
    """Return what is missing to build the library of `what` here, in one sentence; "" if nothing."""
    if not sys.platform.startswith("linux"):
        return f"{what} is built for Linux, and this is {sys.platform}"
    if shutil.which("g++") is None:
        return f"{what} is built with g++, which is not on the PATH; install it (Debian: apt install g++)"
    return ""


def built(what: str, source: Path, libraries: Sequence[str], error: type[DeviceError]) -> Path:
    """Return the library of `what` for this torch: compiled once per source and torch, whose hash is in its name."""
    if not sys.platform.startswith("linux"):  # nothing below was tried elsewhere
        raise error(missing(what))
    place = Path(torch.__file__).parent
    text = source.read_text(encoding="utf-8")
    key = hashlib.sha256("\n".join([text, torch.__version__, str(place)]).encode()).hexdigest()[:16]
    library = cache_folder(error) / f"{source.stem}_{key}.so"
    if library.exists():
        return library
    if problem := missing(what):
        raise error(problem)
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        made = Path(work, library.name)
        words = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", f"-I{place / 'include'}", str(source), "-o", str(made)]
        words += [f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}", *(f"-l{each}" for each in libraries)]
        words.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise error(f"g++ cannot build {what} for torch {torch.__version__}: {errors[:1]}")
        made.replace(library)  # at once, so that two processes may build at the same time
    return library


def cache_folder(error: type[DeviceError]) -> Path:
    """Return a folder that only this user can write to, as what it has is loaded: in the cache, or temporary."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "halfstep")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _private(folder) and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass  # the temporary one is as good, until the next start of the machine
    folder = Path(tempfile.gettempdir(), f"halfstep-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _private(folder):
        raise error(
            f"{folder} belongs to another user, or others can write to it; set XDG_CACHE_HOME to a folder of your own"
        )
    return folder


def _private(folder: Path) -> bool:
    about = folder.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022
