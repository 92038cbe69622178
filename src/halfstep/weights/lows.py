"""Which formats count as low for weights and optimizer states, and what they cannot hold."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

__all__ = ["LOWS", "beyond", "is_low"]

LOWS = (torch.bfloat16, torch.float16)


def is_low(value: object) -> bool:
    """Return whether `value` is a tensor in a low format."""
    return isinstance(value, Tensor) and value.dtype in LOWS


def beyond(name: str, values: Tensor, low: torch.dtype) -> str:
    """Say which of `values`, the weights called `name`, is finite and becomes infinite in `low`; "" for none.

    Waits for the device of `values`.
    """
    values = values.detach()
    if values.is_meta or is_fake(values):
        return ""
    lost = torch.isfinite(values) & torch.isinf(values.to(low))
    if not bool(lost.any()):
        return ""
    worst = values[lost].abs().max().item()
    kind = str(low).removeprefix("torch.")
    return f"parameter {name} holds a weight of magnitude {worst:.8g}, and {kind} ends at {torch.finfo(low).max:.8g}"
