"""What a region makes of linear_cross_entropy, torch's and ours: the product has a rule, and the loss is fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.cast.losses.linear_loss import Settings, fused_loss, loss_in_parts
from halfstep.cast.rules.dispatch import Handler, Lowering, RuleMode, cast, run, tensors_of
from halfstep.cast.rules.handlers import target_of
from halfstep.policy.operators import LINEAR_LOSS

__all__ = ["of_linear_loss"]


def of_linear_loss(rule: str, how: Lowering, *, fused: bool) -> Handler:
    """Return the handler of linear_cross_entropy, torch's or ours: `rule` is for the product.

    Not `fused`: its parts, linear and cross_entropy, are operators of their own, each under its rule.
    """

    def handle(mode: RuleMode, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input, weight, target, bias, settings = _linear_loss(*args, **kwargs)
        tensors = tensors_of((input, weight, bias), mode.devices)
        device = mode.active(tensors)
        if device is None:
            return func(*args, **kwargs)
        if not fused:
            with mode:
                return loss_in_parts(input, weight, bias, target, settings)
        dtype = target_of(rule, LINEAR_LOSS, device, tensors)
        if dtype is not None:
            input, weight, bias = (cast(t, dtype, mode) for t in (input, weight, bias))
        emulating = rule == "low" and device in how.emulating and dtype is torch.float16
        return run(device, fused_loss, (input, weight, bias, target, settings), {"emulating": emulating})

    return handle


def _linear_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    options: Any = None,
    chunk: int | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Settings]:
    """Read the arguments of linear_cross_entropy: ours has `chunk`, torch's `options`, whose rows a chunk are taken."""
    rows = chunk if options is None else options.batch_chunk_size
    return input, linear_weight, target, linear_bias, Settings(chunk=rows, **settings)
