"""A flag in host memory, read without torch."""

from __future__ import annotations

import ctypes

from torch import Tensor

__all__ = ["peek"]


def peek(flag: Tensor) -> bool:
    """Return whether one element in host memory is not zero; torch's own reads count as waits for the device.

    Args:
        flag: one element of any dtype, 0 or 1, on the CPU or in pinned memory; no fake tensor.
    """
    return any(ctypes.string_at(flag.data_ptr(), flag.element_size()))
