"""Which twin runs: chosen by what the tensors are and what the machine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from halfstep.kernels import foreach, native, ops, reference
from halfstep.kernels.reference import total_norm

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})  # formats whose norm fp32 holds to its own accuracy
PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})  # other classes may be sharded, or many tensors in one
STATES = frozenset({torch.float32, torch.bfloat16})

FORMATS: Mapping[str, frozenset[tuple[torch.dtype, torch.dtype | None]]] = {
    "plain": frozenset((dtype, None) for dtype in FLOATS),
    "copy": frozenset({(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}),
    "split": frozenset({(torch.bfloat16, torch.int16)}),
    "kahan": frozenset({(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)}),
    "stochastic": frozenset({(torch.bfloat16, None)}),
}
"""Form -> formats of (weight, beside), see Note [forms] in `ops`."""

ENGINES: Mapping[str, Callable[[], str]] = {"cpu": native.why_not}
"""Device type -> why its operators cannot be used, "" if they can; asking registers them."""

__all__ = ["can_update", "lies_alike", "norms_for", "total_norm", "why_not"]


def why_not(device: torch.device) -> str:
    """Return why the operators of `ops` cannot be used on `device`, in one sentence; "" if they can."""
    ask = ENGINES.get(device.type)
    return f"there are no kernels for the device type {device.type!r}" if ask is None else ask()


def norms_for(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, (len(tensors),) fp32 on the first tensor's device, in one reading pass."""
    if not tensors:
        return reference.norms(tensors)
    first = tensors[0].device
    if not all(t.device == first and t.layout is torch.strided and t.dtype in FLOATS and t.numel() for t in tensors):
        return reference.norms(tensors)
    if all(type(t) in PLAIN and _dense(t) for t in tensors) and not why_not(first):
        norms: Tensor = ops.norms(list(tensors))
        return norms
    return foreach.norms(tensors)


def can_update(
    form: str,
    weights: Sequence[Tensor],
    beside: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> str:
    """Return why the operators of `ops` cannot update these parameters, in one sentence; "" if they can.

    Args:
        form: one of `ops.FORMS`.
        weights: the n-th of each list belongs to one parameter.
        beside: what `form` keeps beside a weight; empty if nothing.
        states: lists of optimizer states in the weights' shapes.
        steps: step counters; empty if the optimizer has none.
        gradients: as the update will find them; those of later steps are compared by `lies_alike`.
    """
    if not weights:
        return "there are no parameters"
    device = weights[0].device
    for name, tensors in (("a weight", weights), ("a second half", beside), ("a step counter", steps)):
        reason = _odd(name, tensors, device)
        if reason:
            return reason
    if any(step.dtype is not torch.float32 or step.dim() for step in steps):
        return "a step counter is not a 0-dim fp32 tensor"
    others: Sequence[torch.dtype | None] = [t.dtype for t in beside] or [None] * len(weights)
    pairs = set(zip((w.dtype for w in weights), others, strict=False))
    for low, other in pairs - FORMATS[form]:
        return f"form {form!r} has no {low} weights with {'nothing' if other is None else other} beside them"
    for name, formats, tensors in (
        ("a second half", {torch.bfloat16, torch.float16, torch.int16}, beside),
        *(("an optimizer state", STATES, state) for state in states),
        ("a gradient", FLOATS, gradients),
    ):
        reason = _odd(name, tensors, device)
        if reason:
            return reason
        if any(t.dtype not in formats for t in tensors):
            return f"{name} is {next(t.dtype for t in tensors if t.dtype not in formats)}"
        if tensors and not lies_alike(tensors, weights):
            return f"{name} lies in memory in another order than its weight"
    return why_not(device)


def lies_alike(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Return whether each tensor has the shape and the strides of its weight, so that kernels may walk memory."""
    return len(tensors) == len(weights) and all(
        t.shape == w.shape and (t.stride() == w.stride() or (t.is_contiguous() and w.is_contiguous()))
        for t, w in zip(tensors, weights, strict=True)
    )


def _odd(name: str, tensors: Sequence[Tensor], device: torch.device) -> str:
    """Return what keeps kernels from walking the memory of `tensors`; "" if nothing does."""
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return f"{name} is a {type(tensor).__name__} of layout {tensor.layout}"
        if tensor.device != device:
            return f"{name} is on {tensor.device}, the first weight on {device}"
        if not _dense(tensor) or tensor.is_neg():
            return f"{name} of shape {tuple(tensor.shape)} has gaps or overlaps in memory"
    return ""


def _dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a stretch of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != reach:
            return False
        reach *= size
    return True
