"""The operators on CUDA as Triton kernels, and whether they can run; Triton is imported when that is first needed.

Nothing here waits for the device. A step of Adam whose parameters agree in format launches five kernels: two for the
norms, one for the check, one for step counters and bias corrections, one for the update.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from halfstep.errors import lacks_memory

LOG = logging.getLogger("halfstep")

OLDEST = (7, 5)
"""Compute capability of the oldest device that Triton supports."""


@cache
def refused() -> str:
    """Return why Triton kernels are not wanted on CUDA devices, in one sentence; "" if they are."""
    if os.environ.get("HALFSTEP_TRITON") == "0":
        return "the environment variable HALFSTEP_TRITON is 0"
    if torch.version.hip is not None and os.environ.get("HALFSTEP_ROCM") != "1":
        return "the kernels have run on no AMD device; HALFSTEP_ROCM=1 uses them, without a promise of bits"
    return ""


@cache
def unsupported(device: torch.device) -> str:
    """Return why Triton kernels cannot run on a CUDA device, in one sentence; "" if they can.

    The first call launches an empty kernel. If that fails, the reason is logged once, as a warning.
    """
    if reason := refused() or ("" if find_spec("triton") is not None else "the package triton is not installed"):
        return reason
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and found < OLDEST:
        return f"{device} has compute capability {found[0]}.{found[1]}, and Triton needs {OLDEST[0]}.{OLDEST[1]}"
    try:
        import_module("halfstep.kernels.triton.words").launch(device)
    except Exception as error:  # of Triton, its compilers or the driver; any class
        if lacks_memory(error):  # which may be there for the next call
            raise
        first = next(iter(str(error).splitlines()), "")[:200]
        reason = f"Triton cannot launch a kernel on {device} ({type(error).__name__}: {first})"
        LOG.warning(
            "%s; torch's operators run instead, which takes more time. Triton needs a C compiler and Python's headers: "
            "install them, or set HALFSTEP_TRITON=0 to choose torch's operators without this message",
            reason,
        )
        return reason
    return ""
