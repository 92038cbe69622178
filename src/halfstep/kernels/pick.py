"""Which twin runs: chosen by what the tensors are, never by a setting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import is_fake

from halfstep.kernels import foreach, native, ops, reference, updates
from halfstep.kernels.reference import total_norm

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})  # formats whose norm fp32 holds to its own accuracy

__all__ = ["cannot_update", "judge_for", "norms_for", "total_norm"]


def cannot_update(tensors: Sequence[Tensor]) -> str:
    """Return why `ops` cannot work on `tensors`; "" if it can. On CPU the first question may take a second (`native`).

    Args:
        tensors: at least one, plain tensors.
    """
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            return f"tensors are on {device} and on {tensor.device}"
        if tensor.layout is not torch.strided or tensor.dtype not in FLOATS:
            return f"a tensor is {str(tensor.layout)[6:]} and {str(tensor.dtype)[6:]}"
        if not tensor.is_contiguous() and not is_non_overlapping_and_dense_or_false(tensor):
            return "a tensor has gaps or shares elements with itself"
    if is_fake(tensors[0]):  # nothing is computed
        return ""
    if device.type == "cpu":
        return native.why_not()
    return f"there are no operators for {device.type}"


def judge_for(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, verdict and factor of a step: `updates.judge`."""
    if cannot_update([norms]):
        return updates.judge(norms, divisor, clip_norm)
    verdict: tuple[Tensor, Tensor, Tensor] = ops.judge(norms, divisor, clip_norm)
    return verdict


def norms_for(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, (len(tensors),) fp32 on the first tensor's device, in one reading pass."""
    if not tensors:
        return reference.norms(tensors)
    if all(type(tensor) is Tensor for tensor in tensors) and not cannot_update(tensors):
        found: Tensor = ops.norms(list(tensors))
        return found
    first = tensors[0].device
    plain = all(t.device == first and t.layout is torch.strided and t.dtype in FLOATS and t.numel() for t in tensors)
    return foreach.norms(tensors) if plain else reference.norms(tensors)
