"""Which twin runs: chosen by what the tensors are and what the machine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from halfstep.errors import FormatError
from halfstep.kernels import native, ops, triton
from halfstep.kernels.eager import foreach, sharded
from halfstep.kernels.reference import exponents, updates
from halfstep.kernels.reference import primitives as reference
from halfstep.kernels.reference.primitives import total_norm
from halfstep.kernels.watched import WatchedParameter

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})  # formats whose norm fp32 holds to its own accuracy
PLAIN = frozenset({Tensor, nn.Parameter, WatchedParameter, FakeTensor})  # others may be sharded, or many tensors

ENGINES: Mapping[str, Callable[[], str]] = {"cpu": native.why_not, "cuda": triton.why_not}
"""Device type -> why its operators cannot be used, "" if they can; asking registers them."""

__all__ = ["cannot_update", "count_exponents_", "judge_for", "norms_for", "total_norm", "why_not"]


def why_not(tensor: Tensor) -> str:
    """Return why the operators of `ops` cannot be used where `tensor` is, in one sentence; "" if they can."""
    device = tensor.device.type
    if type(tensor) is FakeTensor and device == "cuda" and triton.installed():  # nothing runs, so no device is needed
        return ""
    ask = ENGINES.get(device)
    return f"there are no kernels for the device type {device!r}" if ask is None else ask()


def norms_for(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, (len(tensors),) fp32 on the first tensor's device, in one reading pass.

    Of sharded ones (DTensor) the norm of the whole; beside those it is collective over their meshes, and a plain
    tensor that is not finite on one rank has the norm nan on the others.
    """
    if not tensors:
        return reference.norms(tensors)
    first = tensors[0].device
    uniform = all(t.device == first and t.layout is torch.strided and t.dtype in FLOATS and t.numel() for t in tensors)
    if uniform and all(type(t) in PLAIN and _dense(t) for t in tensors) and not why_not(tensors[0]):
        norms: Tensor = ops.norms(list(tensors))
        return norms
    if any(hasattr(t, "device_mesh") for t in tensors):
        return sharded.norms(tensors, norms_for)
    return foreach.norms(tensors) if uniform else reference.norms(tensors)


def judge_for(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, verdict and factor of a step: `updates.judge`."""
    if type(norms) not in PLAIN or norms.dtype is not torch.float32 or why_not(norms):
        return updates.judge(norms, divisor, clip_norm)
    verdict: tuple[Tensor, Tensor, Tensor] = ops.judge(norms, divisor, clip_norm)
    return verdict


def count_exponents_(rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the exponents of the n-th tensor to the n-th row: see `kernels.exponents`. Waits for nothing.

    Args:
        rows: (len(tensors), ROW) int64, contiguous.
        tensors: floating or complex, on the device of `rows`.

    Raises:
        FormatError: a tensor is of integers, or on another device than `rows`.
    """
    found = [exponents.parts(tensor) for tensor in tensors]
    for tensor in found:
        if tensor.device != rows.device:
            raise FormatError(
                f"a tensor on {tensor.device} cannot be counted in rows on {rows.device}; move one of them"
            )
    if not found:
        return
    if all(type(tensor) in PLAIN for tensor in found):
        why_not(found[0])  # to be asked is what makes the kernels take the operator over
        ops.exponents_(rows, found)
    else:
        exponents.count_(rows, found)


def cannot_update(parameters: Sequence[Tensor]) -> str:
    """Return why `ops` cannot work on `parameters`; "" if it can. On CPU the first question may take a second.

    Args:
        parameters: at least one.
    """
    device = parameters[0].device
    for parameter in parameters:
        if type(parameter) not in PLAIN or parameter.layout is not torch.strided or parameter.dtype not in FLOATS:
            return f"a parameter is a {type(parameter).__name__} of {parameter.dtype}, {parameter.layout}"
        if parameter.device != device:
            return f"parameters are on {device} and on {parameter.device}"
        if not _dense(parameter):
            return "a parameter has gaps in memory, or shares elements with itself"
    return why_not(parameters[0])


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
