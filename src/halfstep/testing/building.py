"""Building: the C++ libraries of the test devices, compiled against the installed torch on first use."""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import halfstep as hs
from halfstep.kernels.native.compiler import Unavailable, cache_folder, compile_to


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
    library = cache_folder() / f"{source.stem}_{key}.so"
    if library.exists():
        return library
    if problem := missing(what):
        raise error(problem)
    flags = ["-O0", "-std=c++20", "-fPIC", "-shared", f"-I{place / 'include'}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    links = [f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}", *(f"-l{each}" for each in libraries)]
    try:
        compile_to(library, ["g++", *flags, str(source), *links], f"{what} for torch {torch.__version__}")
    except Unavailable as cause:
        raise error(str(cause)) from cause
    return library
