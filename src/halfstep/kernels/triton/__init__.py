"""The operators on CUDA as Triton kernels; Triton is imported when the first of them runs.

Nothing here waits for the device. A step of Adam whose parameters agree in format launches five kernels: two for the
norms, one for the check, one for step counters and bias corrections, one for the update.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["installed", "unsupported"]

OLDEST = (7, 5)
"""Compute capability of the oldest device that Triton supports."""


@cache
def installed() -> bool:
    """Return whether Triton can be imported."""
    return find_spec("triton") is not None


@cache
def unsupported() -> str:
    """Return why Triton's kernels cannot run on the CUDA devices of this machine, in one sentence; "" if they can."""
    if torch.version.hip is not None:
        return "the kernels were never tried on AMD's devices"
    if not installed():
        return "the package triton is not installed"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_capability(index)
        if found < OLDEST:
            return (
                f"cuda:{index} has compute capability {found[0]}.{found[1]}, and Triton needs {OLDEST[0]}.{OLDEST[1]}"
            )
    return ""
