"""Which twin runs: chosen by what the tensors are, never by a setting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.kernels import foreach, reference, updates
from halfstep.kernels.reference import total_norm

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})  # formats whose norm fp32 holds to its own accuracy

__all__ = ["cannot_update", "judge_for", "norms_for", "total_norm"]


def cannot_update(tensors: Sequence[Tensor]) -> str:
    """Return why `ops` cannot update `tensors`; "" if it can."""
    return "TODO"


def judge_for(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, verdict and factor of a step: `updates.judge`."""
    return updates.judge(norms, divisor, clip_norm)


def norms_for(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, (len(tensors),) fp32 on the first tensor's device, in one reading pass."""
    if not tensors:
        return reference.norms(tensors)
    first = tensors[0].device
    plain = all(t.device == first and t.layout is torch.strided and t.dtype in FLOATS and t.numel() for t in tensors)
    return foreach.norms(tensors) if plain else reference.norms(tensors)
