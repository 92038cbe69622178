"""Norms of fp16 inputs on a CPU: low in, fp32 inside, one rounding, as CUDA's kernels compute them.

torch's kernels for CPUs (2.13) differ in two ways, found by comparing them with fp64:

- They save mean and reciprocal deviation in the format of the weights, or of the input where there are no weights.
  In fp16 the reciprocal deviation of a constant row with a small eps is infinite (1 / sqrt(1e-12) is 1e6, above 65504),
  and the backward pass with it. With fp32 weights the same kernels compute and save in fp32, and round once.
- layer_norm sums the gradients of its weights over rows in the format of the input, whatever the weights are: an error
  of 10 ulp after 4,096 rows. It is computed in fp32, in the backward pass again from the low input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.cast.arithmetic.rounded import recomputed

_GROUP = ("input", "num_groups", "weight", "bias")

STATEFUL_IN_F = ("input", "running_mean", "running_var", "weight", "bias")
"""First arguments of F.batch_norm and F.instance_norm."""

STATEFUL = ("input", "weight", "bias", "running_mean", "running_var")
"""First arguments of torch.batch_norm and torch.instance_norm."""

_OTHERS: Mapping[Callable[..., Any], tuple[str, ...]] = {
    F.group_norm: _GROUP,
    torch.group_norm: _GROUP,
    F.batch_norm: STATEFUL_IN_F,
    torch.batch_norm: STATEFUL,
    F.instance_norm: STATEFUL_IN_F,
    torch.instance_norm: STATEFUL,
}
"""Callable -> its first arguments."""

NORMS = frozenset({F.layer_norm, torch.layer_norm, *_OTHERS})
"""The norms with such kernels; rms_norm computes in fp32 whatever its weight is."""


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    if not _is_fp16_on_cpu(input):
        return torch.layer_norm(input, normalized_shape, weight, bias, eps, cudnn_enable)

    def compute(wide: Tensor, *affine: Tensor) -> Tensor:
        rest = iter(affine)
        scale, shift = (None if one is None else next(rest) for one in (weight, bias))
        return torch.layer_norm(wide, normalized_shape, scale, shift, eps)

    return recomputed(compute, input, *(one for one in (weight, bias) if one is not None))


def _is_fp16_on_cpu(input: Any) -> bool:
    return isinstance(input, Tensor) and input.dtype is torch.float16 and input.device.type == "cpu"


def wide_statistics(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`, one of `NORMS`, in fp32 for fp16 inputs on a CPU; other than layer_norm, by fp32 weights, or ones.

    Gradients of its own weights are rounded once, where they leave. Low running statistics are left as they are, for
    kernels write into them.
    """
    if func not in _OTHERS:
        return _layer_norm
    names = _OTHERS[func]

    @functools.wraps(func)
    def wide(*args: Any, **kwargs: Any) -> Any:
        values: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        input: Any = values.get("input")
        running = values.get("running_mean")
        if not _is_fp16_on_cpu(input) or (isinstance(running, Tensor) and running.dtype is torch.float16):
            return func(*args, **kwargs)
        weight = values.get("weight")
        if weight is None:
            weight = torch.ones(input.shape[1], dtype=torch.float32, device=input.device)
        bias = values.get("bias")
        given = {"weight": weight.float(), "bias": None if bias is None else bias.float()}
        head = [given.pop(name, value) for name, value in zip(names, args, strict=False)]
        return func(*head, *args[len(names) :], **{**kwargs, **given})

    return wide
