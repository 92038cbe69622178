"""Norms of fp16 inputs on a CPU keep mean and reciprocal deviation in fp32, as CUDA's kernels do.

torch's kernels for CPUs save the statistics in the format of the weights, or of the input where there are no weights. In
fp16 the reciprocal deviation of a constant row with a small eps is infinite (1 / sqrt(1e-12) is 1e6, above 65504), and
the backward pass with it. With fp32 weights the same kernels take a low input, compute and save in fp32, and round once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.cast.dispatch import Handler, RuleMode

__all__ = ["NORMS", "of_norm", "wide_statistics"]

_LAYER = ("input", "normalized_shape", "weight", "bias")
_GROUP = ("input", "num_groups", "weight", "bias")
_STATEFUL_F = ("input", "running_mean", "running_var", "weight", "bias")
_STATEFUL = ("input", "weight", "bias", "running_mean", "running_var")

NORMS: Mapping[Callable[..., Any], tuple[str, ...]] = {
    F.layer_norm: _LAYER,
    torch.layer_norm: _LAYER,
    F.group_norm: _GROUP,
    torch.group_norm: _GROUP,
    F.batch_norm: _STATEFUL_F,
    torch.batch_norm: _STATEFUL,
    F.instance_norm: _STATEFUL_F,
    torch.instance_norm: _STATEFUL,
}
"""Callable -> its first arguments. rms_norm is not among them: it computes in fp32 whatever its weight is."""


def wide_statistics(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`, one of `NORMS`, with fp32 weights for fp16 inputs on a CPU: its own in fp32, or ones.

    Gradients of its own weights are rounded once, where they leave. Low running statistics are left as they are, for
    kernels write into them.
    """
    names = NORMS[func]

    @functools.wraps(func)
    def wide(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        input, running = values.get("input"), values.get("running_mean")
        if not isinstance(input, Tensor) or input.dtype is not torch.float16 or input.device.type != "cpu":
            return func(*args, **kwargs)
        if isinstance(running, Tensor) and running.dtype is torch.float16:
            return func(*args, **kwargs)
        weight = values.get("weight")
        if weight is None:
            shape = values["normalized_shape"] if names is _LAYER else (input.shape[1],)
            weight = torch.ones(shape, dtype=torch.float32, device=input.device)
        bias = values.get("bias")
        given = {"weight": weight.float(), "bias": None if bias is None else bias.float()}
        head = [given.pop(name, value) for name, value in zip(names, args, strict=False)]
        return func(*head, *args[len(names) :], **{**kwargs, **given})

    return wide


def of_norm(handler: Handler | None, func: Callable[..., Any]) -> Handler:
    """Return the handler of `func`, one of `NORMS`, that does what `handler` does (None: nothing), statistics in fp32."""
    wide = wide_statistics(func)

    def handle(mode: RuleMode, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wide(*args, **kwargs) if handler is None else handler(mode, wide, args, kwargs)

    return handle
