"""Keep the memory pages of a training step on a CPU mapped from step to step.

Note [pages]: glibc's malloc gives memory back to the system when a block of more than 32 MiB is freed, and when the
top of its heap is free. A training step frees its activations and gradients and needs as much again a moment later;
each page that was given back costs a fault and is zeroed again. For blocks below 32 MiB this depends on what happens to
lie above them in the heap. While a training step is in use on a CPU, malloc keeps what is freed: no
block is mapped by itself up to 2 GiB, and the top of the heap is not cut. When the last such step is gone, malloc
returns free pages, and gives memory back as it does by default.

The setting holds for the whole process, as malloc has no other. It begins after a step's first update: blocks allocated
before it (the model, the optimizer's state) keep their places, and the buffers of that update leave no holes between
them, into which aligned blocks of the same size would not fit again.

Note [user's settings]: where the environment of the process sets malloc's thresholds (`MALLOC_MMAP_THRESHOLD_`,
``GLIBC_TUNABLES=glibc.malloc.trim_threshold=...``), these stay in force, and nothing is kept. glibc has no function
that returns a setting, so one that a program made itself with `mallopt` is not seen. Any call of `mallopt` ends the
adjustment of the thresholds by malloc; after the last step they are what that adjustment ends at.
"""

import ctypes
import os
import sys
import weakref
from functools import cache
from typing import Any

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of settings: https://man7.org/linux/man-pages/man3/mallopt.3.html
NEVER = -1  # of TRIM_THRESHOLD
LARGEST = 2**31 - 1  # bytes, of MMAP_THRESHOLD: mallopt takes an int
SETTINGS = "mmap_threshold", "mmap_max", "top_pad", "trim_threshold"  # each ends the adjustment by malloc
MOST_BY_DEFAULT = 2**25  # bytes: where MMAP_THRESHOLD ends when malloc moves it by itself; TRIM_THRESHOLD ends at twice

_users: set[int] = set()
"""Ids of the steps that keep pages."""


def keep_pages(user: object) -> None:
    """Let malloc, where it is glibc's without settings of the user's, keep freed memory as long as `user` lives."""
    library = _glibc()
    if library is None or _is_set():
        return
    if id(user) in _users:
        return
    if not _users:
        if not library.mallopt(MMAP_THRESHOLD, LARGEST):  # some versions take no more than the most by default
            library.mallopt(MMAP_THRESHOLD, MOST_BY_DEFAULT)
        library.mallopt(TRIM_THRESHOLD, NEVER)
    _users.add(id(user))
    weakref.finalize(user, _leave, id(user)).atexit = False


def _leave(user: int) -> None:
    _users.discard(user)
    if not _users:
        library = _glibc()
        library.mallopt(MMAP_THRESHOLD, MOST_BY_DEFAULT)
        library.mallopt(TRIM_THRESHOLD, 2 * MOST_BY_DEFAULT)
        library.malloc_trim(0)


@cache
def _is_set() -> bool:
    """Return whether the environment has settings of malloc's thresholds; note [user's settings]."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables for name in SETTINGS)


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
