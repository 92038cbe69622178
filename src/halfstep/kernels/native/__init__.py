"""The tail's operators on CPU: `kernels.cpp`, compiled by the machine's own compiler when somebody first asks for it.

Compiled with no more than a C++ compiler, in about a second, into a cache of the user's (`compiler`): no headers of
torch or Python, so nothing that changes with their versions. Called through ctypes (`calls`), which lets other threads
run meanwhile.
"""

from __future__ import annotations

import os
import threading
from functools import cache

from halfstep.kernels.native.calls import Kernels
from halfstep.kernels.native.compiler import Unavailable, library
from halfstep.kernels.ops import LIBRARY

__all__ = ["why_not"]

_LOCK = threading.Lock()


def why_not() -> str:
    """Return why the compiled kernels cannot be used, in one sentence; "" if they can, and then they are registered.

    Compiles them if no process of this user has done so on a machine like this.
    """
    if os.environ.get("HALFSTEP_NATIVE") == "0":
        return "the environment variable HALFSTEP_NATIVE is 0"
    with _LOCK:
        return _registered()


@cache
def _registered() -> str:
    try:
        kernels = Kernels(library())
    except Unavailable as reason:
        return str(reason)
    except OSError as error:  # a full disk, a file taken away
        return f"the kernels could not be compiled: {error}"
    for name in ("norms", "judge", "advance_", "adam_", "sgd_", "lion_", "exponents_"):
        LIBRARY.impl(name, getattr(kernels, name), "CPU")
    return ""
