"""The scale rule as a function: (state, found_inf) -> state on 0-dim device tensors.

`advance` defines the rule: a pure function that reads nothing from the device and has no Python branch on a tensor's
value, so it can be captured in a CUDA graph and compiled. `advance_` does the same in place, in one kernel and a clamp
where the rule is torch's own kind. The peers' "(step - last bad step) % window == 0" counts good steps in a row too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.arguments import check
from halfstep.errors import ScaleError
from halfstep.formats import widest_dtype
from halfstep.kernels import ops
from halfstep.kernels.choose import why_no_kernels
from halfstep.policy.scale_rule import FP32_MAX, ScaleRule, between
from halfstep.torch_private.foreach import amp_update_scale_


class ScaleState(NamedTuple):
    """The state of a scale rule; every field a 0-dim tensor on one device: a number in `ScaleRule.kept`, int32, bool.

    Attributes:
        scale: the factor a loss is multiplied by.
        good: good steps that count towards the next growth (negative while `ScaleRule.delay` runs).
        slack: bad steps that will still be forgiven (hysteresis less one, when full).
        steps, misses: steps since the scale last moved, bad ones since it last went down; only under a `tolerance`.
        streak: bad steps in a row; kept only under a `patience`.
        bad: all bad steps so far.
        alarm: the last step was bad and the scale could not go down for it, or patience ran out. A device cannot raise,
            so the scaler reads this flag and warns or raises.
    """

    scale: Tensor
    good: Tensor
    slack: Tensor
    steps: Tensor
    misses: Tensor
    streak: Tensor
    bad: Tensor
    alarm: Tensor


def initial_host(rule: ScaleRule) -> dict[str, Any]:
    """Return the state before the first step as plain numbers."""
    first = {"scale": representable(rule, rule.init), "good": -rule.delay, "slack": rule.hysteresis - 1, "alarm": False}
    return {**dict.fromkeys(ScaleState._fields, 0), **first}


def representable(rule: ScaleRule, value: float) -> float:
    """Return the number nearest to `value` that the scale of `rule` can be."""
    return fp32(value) if rule.kept == "fp32" else float(value)


def fp32(value: float) -> float:
    """Return the fp32 number nearest to a finite `value` within fp32's range."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def initial_state(rule: ScaleRule, device: torch.device | str) -> ScaleState:
    """Return the state before the first step, on `device`."""
    return load_host(initial_host(rule), device, rule)


def load_host(values: Mapping[str, Any], device: torch.device | str, rule: ScaleRule | None = None) -> ScaleState:
    """Return plain numbers (as `state_to_host` gives them) as a state on `device`, in the format `rule` keeps."""
    wide = rule is not None and rule.kept == "fp64"
    dtypes = (widest_dtype(torch.device(device)) if wide else torch.float32, *[torch.int32] * 6, torch.bool)
    # full, not tensor: the number travels as a kernel argument, so this can run while a CUDA graph is being captured.
    names = zip(ScaleState._fields, dtypes, strict=True)
    return ScaleState(*(torch.full((), values[name], dtype=dtype, device=device) for name, dtype in names))


def state_to_host(state: ScaleState) -> dict[str, Any]:
    """Copy a state to plain numbers; one wait for the device."""
    wide = widest_dtype(state.scale.device)  # int32 fits float64 exactly
    scale, *counts, alarm = torch.stack([field.to(wide) for field in state]).tolist()
    return dict(zip(ScaleState._fields, (scale, *map(int, counts), bool(alarm)), strict=True))


def advance(rule: ScaleRule, state: ScaleState, found_inf: Tensor) -> ScaleState:
    """Return the state after one step; fields that the rule does not use are the same tensors as in `state`.

    `found_inf`: one element, bool or number, on the state's device; not zero means the step was bad.
    """
    scale, good, slack, steps, misses, streak, total, _ = state
    bad = found_inf.reshape(()) != 0
    counted = good + 1
    grow = ~bad & (counted >= rule.interval)
    due = bad  # the scale is to go down
    if rule.hysteresis > 1:
        due = due & (slack <= 0)
        refill = grow if rule.refill == "growth" else ~bad
        slack = torch.where(refill, rule.hysteresis - 1, torch.where(bad, (slack - 1).clamp(min=0), slack))
    if rule.tolerance > 0.0:
        steps, misses = steps + 1, misses + bad
        wide = widest_dtype(scale.device)
        due = due & (misses.to(wide) / steps.to(wide) >= rule.tolerance)
        steps, misses = torch.where(due | grow, 0, steps), torch.where(due, 0, misses)

    raised = _times(scale, rule.growth)
    if rule.ceiling < FP32_MAX:
        raised = raised.clamp(max=rule.ceiling)
    elif rule.guard:
        raised = torch.where(raised <= FP32_MAX, raised, scale)
    lowered = _over(scale, rule.growth) if rule.divide else _times(scale, rule.backoff)
    if rule.at_floor == "refuse":
        cornered = lowered <= rule.floor
        lowered = torch.where(cornered, scale, lowered)
    else:
        cornered = scale <= rule.floor
        lowered = lowered.clamp(min=rule.floor)
    if not rule.guard:
        cornered = cornered | scale.isinf()

    alarm = due & cornered
    if rule.patience:
        streak = torch.where(bad, streak + 1, 0)
        alarm = alarm | (streak > rule.patience)
    scale = torch.where(due, lowered, torch.where(grow, raised, scale))
    good = torch.where(bad, -rule.delay, torch.where(grow, 0, counted))
    return ScaleState(scale, good, slack, steps, misses, streak, total + bad, alarm)


def advance_(rule: ScaleRule, state: ScaleState, found_inf: Tensor) -> None:
    """Do what `advance` does, bit-equal to it, but in place, so that addresses stay the same for CUDA graphs.

    `found_inf` is 0-dim, fp32 or bool, on the state's device.
    """
    if not _is_plain(rule):
        for old, new in zip(state, advance(rule, state, found_inf), strict=True):
            if new is not old:
                old.copy_(new)
        return
    if not why_no_kernels(state.scale):
        bounds = (rule.growth, rule.backoff, rule.interval, rule.floor, rule.ceiling)
        ops.advance_(state.scale, state.good, state.bad, state.alarm, found_inf, *bounds)
        return
    found_inf = found_inf.to(torch.float32)
    torch.logical_and(found_inf, state.scale <= rule.floor, out=state.alarm)
    state.bad.add_(found_inf != 0)
    amp_update_scale_(state.scale, state.good, found_inf, rule.growth, rule.backoff, rule.interval)
    if rule.floor > 0.0 or rule.ceiling < FP32_MAX:
        state.scale.clamp_(rule.floor, rule.ceiling)


def set_scale_(rule: ScaleRule, state: ScaleState, value: Tensor | float) -> None:
    """Set the scale by hand, in place, without reading the device; counters stay as they are.

    A tensor of one element is clamped into the rule's bounds, and ignored if it is not positive and finite: checking it
    would wait for the device.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.requires_grad or value.is_complex():
            raise ScaleError(
                f"update(new_scale=...): a tensor of shape {tuple(value.shape)} and dtype {value.dtype}, "
                f"requires_grad={value.requires_grad}; expected one real element without grad"
            )
        wanted = value.detach().reshape(()).to(device=state.scale.device, dtype=state.scale.dtype, non_blocking=True)
        usable = wanted.isfinite() & (wanted > 0)
        state.scale.copy_(torch.where(usable, wanted.clamp(rule.floor, rule.ceiling), state.scale))
        return
    check_scale(rule, value)
    state.scale.fill_(value)


def check_scale(rule: ScaleRule, value: object) -> None:
    """Raise ScaleError unless `value`, given to `update`, is a number that `rule` can hold as a scale."""
    remedy = "the scale's bounds (floor= and ceiling= of GradScaler set them), or a one-element tensor"
    check("update", ScaleError, new_scale=(value, between(max(rule.floor, 2.0**-149), rule.ceiling, remedy)))


def _is_plain(rule: ScaleRule) -> bool:
    """Whether torch's own update kernel and a clamp compute this rule exactly."""
    return (
        rule.hysteresis == 1
        and rule.delay == 0
        and rule.tolerance == 0.0
        and rule.patience == 0
        and rule.guard
        and not rule.divide
        and rule.kept == "fp32"
        and rule.at_floor != "refuse"
        # The kernel refuses a growth to inf before the clamp could bring it down to the ceiling.
        and (rule.ceiling == FP32_MAX or rule.ceiling * rule.growth <= FP32_MAX)
    )


def _times(scale: Tensor, factor: float) -> Tensor:
    # where there is float64 the product is rounded only once
    return (scale.to(widest_dtype(scale.device)) * factor).to(scale.dtype)


def _over(scale: Tensor, divisor: float) -> Tensor:
    # A tensor as divisor: CUDA turns a division by a number into a product with its reciprocal.
    wide = scale.to(widest_dtype(scale.device))
    return (wide / torch.full_like(wide, divisor)).to(scale.dtype)
