"""Step an optimizer that skips on the device: torch's protocol of ``grad_scale`` and ``found_inf``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.scale.older import takes_scaler

__all__ = ["must_not_skip", "skips_itself", "step_with_flag"]

_ATTRIBUTES = ("grad_scale", "found_inf")


def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` takes scale and flag as attributes (torch's optimizers with ``fused=True``).

    torch's own marker outlives a `load_state_dict` that puts another form into the groups.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused", True) for group in optimizer.param_groups) and not takes_scaler(optimizer)


def must_not_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a skip on the device would do harm, so that the host must decide.

    torch's fused SGD (2.13) allocates its momentum without filling it in the first step that it is called for; if that
    one is skipped, the next good step starts from whatever was in memory.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if group["momentum"]:
            first = next((parameter for parameter in group["params"] if parameter.grad is not None), None)
            if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
                return True
    return False


def step_with_flag(
    optimizer: torch.optim.Optimizer, scale: Tensor | None, found: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``optimizer.step``, which divides gradients by ``grad_scale`` and does nothing if ``found_inf`` is not zero.

    As in torch, a ``grad_scale`` that the user has set beforehand is multiplied in and used up. If the step raises,
    both attributes are as they were before.

    Args:
        optimizer: one that `skips_itself`.
        scale: 0-dim fp32, or None if its gradients have been unscaled.
        found: 0-dim fp32, not zero = skip.
        args: passed on to step.
        kwargs: passed on to step.
    """
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
    own = getattr(optimizer, "grad_scale", None)
    factors = [factor for factor in (scale, own) if factor is not None]
    attributes["grad_scale"] = factors[0] * factors[1] if len(factors) == 2 else next(iter(factors), None)
    attributes["found_inf"] = found
    try:
        result = optimizer.step(*args, **kwargs)
    except BaseException:
        for name in _ATTRIBUTES:
            attributes.pop(name, None)
        attributes.update(before)
        raise
    for name in _ATTRIBUTES:
        attributes.pop(name, None)
    return result
