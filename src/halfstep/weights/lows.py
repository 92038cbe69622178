"""Which formats count as low for weights and optimizer states."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOWS", "is_low"]

LOWS = (torch.bfloat16, torch.float16)


def is_low(value: object) -> bool:
    """Return whether `value` is a tensor in a low format."""
    return isinstance(value, Tensor) and value.dtype in LOWS
