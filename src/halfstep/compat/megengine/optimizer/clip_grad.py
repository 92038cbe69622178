"""Clipping, between `GradScaler.unscale` and the step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep.errors import StepError

__all__ = ["clip_grad_norm", "clip_grad_value"]


def clip_grad_norm(tensors: Tensor | Iterable[Tensor], max_norm: float, ord: float = 2.0) -> Tensor:
    """Scale gradients together so that their norm is at most `max_norm`; return the norm before."""
    return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type=ord)


@torch.no_grad()
def clip_grad_value(tensors: Tensor | Iterable[Tensor], lower: float, upper: float) -> None:
    """Bring every element of the gradients between `lower` and `upper`.

    Raises:
        StepError: `lower` is above `upper`.
    """
    if lower > upper:
        raise StepError(f"clip_grad_value: lower={lower!r} is above upper={upper!r}; exchange them")
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        if tensor.grad is not None:
            tensor.grad.clamp_(lower, upper)
