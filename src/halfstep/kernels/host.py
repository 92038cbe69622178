"""Flags and numbers in host memory, read without torch."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

__all__ = ["number", "peek"]

CODES = {torch.float16: "e", torch.float32: "f", torch.float64: "d"}


def peek(flag: Tensor) -> bool:
    """Return whether one element in host memory is not zero; torch's own reads count as waits for the device.

    Args:
        flag: one element of any dtype, 0 or 1, on the CPU or in pinned memory; no fake tensor.
    """
    return any(ctypes.string_at(flag.data_ptr(), flag.element_size()))


def number(value: Tensor) -> float:
    """Return one number; of a plain tensor in host memory without asking torch, of any other by waiting for it."""
    if type(value) is not Tensor or value.device.type != "cpu" or value.dtype not in CODES:
        return float(value)
    return float(struct.unpack(CODES[value.dtype], ctypes.string_at(value.data_ptr(), value.element_size()))[0])
