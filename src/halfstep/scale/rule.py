"""A scale rule as a function, (state, found_inf) -> state on 0-dim device tensors; and what stores both.

`advance` defines the rule: a pure function that reads nothing from the device and has no Python branch on a tensor's
value, so it can be captured in a CUDA graph and compiled. `advance_` does the same in place, in one kernel and a clamp
where the rule is torch's own kind. The peers' "(step - last bad step) % window == 0" counts good steps in a row too.

`StoredScale` has numbers on the host until there are tensors. Its checkpoint has torch's five keys, and one of our own
for what torch does not keep.
"""

import dataclasses
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.arguments import COUNT, NOT_NEGATIVE, POSITIVE, Kind, a, check, one_of
from halfstep.errors import ScaleError, warn
from halfstep.formats import widest_dtype
from halfstep.kernels import ops
from halfstep.kernels.choose import why_no_kernels
from halfstep.mistakes import MISTAKES
from halfstep.policy.scale_rule import FP32_MAX, SCALE_RULES, ScaleRule, between, plain, steps_from, whole
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


# ------------------------------------------------------------------ chosen, read, set, saved and loaded

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OWN_KEY = "halfstep"  # torch's load_state_dict ignores unknown keys
OWN_COUNTERS = ("slack", "steps", "misses", "streak", "bad")

TORCH_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}

STATIC = "is usual (a scale that stays: rule=ScaleRule.static(value))"
FACTORS = {
    "growth_factor": Kind(f"a number above 1, 2.0 {STATIC}", lambda value: POSITIVE.has(value) and value > 1),
    "backoff_factor": Kind(f"a number above 0 and below 1, 0.5 {STATIC}", lambda v: POSITIVE.has(v) and v < 1),
}
"""torch's factors and what it takes for them."""


def choose_rule(
    values: Iterable[Any], rule: ScaleRule | str | None, floor: float | None, ceiling: float | None, hysteresis: int
) -> ScaleRule:
    """Return the rule that GradScaler's arguments of these names describe; `values` are those of `TORCH_DEFAULTS`."""
    numbers = dict(zip(TORCH_DEFAULTS, map(plain, values), strict=True))
    given = {"floor": plain(floor), "ceiling": plain(ceiling)}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    check("GradScaler", ScaleError, hysteresis=(hysteresis, COUNT))
    if hysteresis != 1:
        changes["hysteresis"] = hysteresis
    if rule is not None:
        beside = [name for name, value in numbers.items() if value != TORCH_DEFAULTS[name]]
        if beside:
            raise ScaleError(
                f"GradScaler: {', '.join(beside)} given beside rule=; put the numbers into the rule, "
                "dataclasses.replace(rule, ...) makes one with other numbers"
            )
        check("GradScaler", ScaleError, rule=(rule, a(ScaleRule) | one_of(*SCALE_RULES)))
        return dataclasses.replace(rule if isinstance(rule, ScaleRule) else SCALE_RULES[rule], **changes)
    check("GradScaler", ScaleError, **{name: (numbers[name], kind) for name, kind in FACTORS.items()})
    init, default = numbers["init_scale"], SCALE_RULES["halfstep"]
    if isinstance(init, (int, float)) and math.isfinite(init) and init > 0:  # bounds wide enough for the first scale
        changes = {"floor": min(default.floor, init), "ceiling": max(default.ceiling, init), **changes}
    changes |= {"growth": numbers["growth_factor"], "backoff": numbers["backoff_factor"]}
    return dataclasses.replace(default, init=init, interval=numbers["growth_interval"], **changes)


class StoredScale:
    """The part of a scaler that is read, set, saved and loaded; the methods are torch.amp.GradScaler's."""

    def __init__(self, rule: ScaleRule, *, enabled: bool) -> None:
        self._rule = rule
        self._enabled = enabled
        self._host = initial_host(rule)  # the state until there are tensors
        self._state: ScaleState | None = None

    @property
    def rule(self) -> ScaleRule:
        """The numbers in force."""
        return self._rule

    @property
    def is_started(self) -> bool:
        """Whether a loss has been scaled, or the scale read on a device."""
        return self._state is not None

    def is_enabled(self) -> bool:
        """Return whether this scaler scales. Fixed at construction: a caller may read it once."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the current scale, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        return float(self._host["scale"] if self._state is None else self._state.scale)

    def get_growth_factor(self) -> float:
        """Return the factor the scale grows by."""
        return self._rule.growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor the scale grows by; a rule that divides also backs off by it."""
        new_factor = plain(new_factor)
        check("GradScaler", ScaleError, growth_factor=(new_factor, FACTORS["growth_factor"]))
        backoff = 1.0 / new_factor if self._rule.divide else self._rule.backoff
        self._rule = dataclasses.replace(self._rule, growth=new_factor, backoff=backoff)

    def get_backoff_factor(self) -> float:
        """Return the factor a bad step multiplies the scale by."""
        return self._rule.backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor a bad step multiplies the scale by."""
        new_factor = plain(new_factor)
        check("GradScaler", ScaleError, backoff_factor=(new_factor, FACTORS["backoff_factor"]))
        self._rule = dataclasses.replace(self._rule, backoff=new_factor)

    def get_growth_interval(self) -> int:
        """Return how many good steps in a row make the scale grow."""
        return self._rule.interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set how many good steps in a row make the scale grow; if that many are past, the next one does."""
        self._rule = dataclasses.replace(self._rule, interval=new_interval)
        most = self._rule.interval - 1
        self._host["good"] = min(self._host["good"], most)
        if self._state is not None:
            self._state.good.clamp_(max=most)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers under torch's five keys and one of our own; waits for the device.

        torch.amp.GradScaler loads it too. Call it after `update`. Empty if disabled.
        """
        if not self._enabled:
            return {}
        rule, host = self._rule, self._host_state()
        values = (host["scale"], rule.growth, rule.backoff, rule.interval, host["good"])
        own = {name: host[name] for name in OWN_COUNTERS}
        return {**dict(zip(_TORCH_KEYS, values, strict=True)), _OWN_KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch.amp.GradScaler returned; nothing changes if that fails.

        Growth, backoff and interval come from the state as in torch; floor, ceiling and the rest stay this scaler's.
        A scale outside them (torch's may be 0) is brought inside with a warning. Does nothing if disabled.

        Raises:
            ScaleError: empty, a key is missing, or a value makes no sense.
        """
        if not self._enabled:
            return
        self._rule, self._host = _loaded(self._rule, state_dict)
        if self._state is not None:
            for name, field in zip(ScaleState._fields, self._state, strict=True):
                field.fill_(self._host[name])

    def scale_on(self, device: torch.device | str) -> Tensor:
        """Return the current scale as a 0-dim fp32 tensor on `device` (1 if disabled), without waiting.

        On the scaler's own device, which is the first one given, it is the live tensor (but for a rule that keeps
        fp64): `update` changes it in place, so clone it to keep a value, and do not write to it.
        """
        if not self._enabled:
            return torch.ones((), dtype=torch.float32, device=device)
        return self._state_on(device).scale.to(device=device, dtype=torch.float32, non_blocking=True)

    def _state_on(self, device: torch.device | str) -> ScaleState:
        if self._state is None:
            self._state = load_host(self._host, device, self._rule)
        return self._state

    def _started(self, method: str) -> ScaleState:
        if self._state is None:
            raise ScaleError(f"{method}(): no loss has been scaled yet; {MISTAKES['HS007'].remedy}")
        return self._state

    def _host_state(self) -> dict[str, Any]:
        return dict(self._host) if self._state is None else state_to_host(self._state)

    def _set_scale(self, value: Any) -> None:
        """Set the scale by hand, in place, without reading the device; counters stay as they are.

        A tensor of one element makes the state on its own device if there is none yet. It is clamped into the rule's
        bounds, and ignored if it is not positive and finite: checking it would wait for the device.
        """
        rule = self._rule
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.requires_grad or value.is_complex():
                raise ScaleError(
                    f"update(new_scale=...): a tensor of shape {tuple(value.shape)} and dtype {value.dtype}, "
                    f"requires_grad={value.requires_grad}; expected one real element without grad"
                )
            scale = self._state_on(value.device).scale
            wanted = value.detach().reshape(()).to(device=scale.device, dtype=scale.dtype, non_blocking=True)
            usable = wanted.isfinite() & (wanted > 0)
            scale.copy_(torch.where(usable, wanted.clamp(rule.floor, rule.ceiling), scale))
            return
        value = plain(value)
        remedy = "the scale's bounds (floor= and ceiling= of GradScaler set them), or a one-element tensor"
        check("update", ScaleError, new_scale=(value, between(max(rule.floor, 2.0**-149), rule.ceiling, remedy)))
        if self._state is not None:
            self._state.scale.fill_(value)
        else:
            self._host["scale"] = representable(rule, value)


def _loaded(rule: ScaleRule, state: Mapping[str, Any]) -> tuple[ScaleRule, dict[str, Any]]:
    """Return `rule` with a checkpoint's growth, backoff and interval, and its state as `load_host` takes it."""
    if not isinstance(state, Mapping):
        raise ScaleError(f"load_state_dict: got a {type(state).__name__}; expected what state_dict() returned")
    if not state:
        raise ScaleError(
            "load_state_dict: the state is empty, as a disabled scaler saves it; load it into "
            "GradScaler(enabled=False), or start this scaler without loading"
        )
    missing = [key for key in _TORCH_KEYS if key not in state]
    if missing:
        raise ScaleError(f"load_state_dict: {', '.join(map(repr, missing))} missing; the state has {sorted(state)}")
    try:
        rule = dataclasses.replace(
            rule, growth=state["growth_factor"], backoff=state["backoff_factor"], interval=state["growth_interval"]
        )
    except ScaleError as error:
        raise ScaleError(f"load_state_dict: {error}") from error
    own = state.get(_OWN_KEY, {})
    if not isinstance(own, Mapping):
        raise ScaleError(f"load_state_dict: {_OWN_KEY!r} is {own!r}; expected a dict of counters")
    scale, tracker = plain(state["scale"]), whole(plain(state["_growth_tracker"]))
    counters = {name: whole(plain(own[name])) for name in OWN_COUNTERS if name in own}
    kinds = {"_growth_tracker": (tracker, steps_from(-rule.delay)), "scale": (scale, NOT_NEGATIVE)}
    kinds |= {name: (count, steps_from(0)) for name, count in counters.items()}
    check("load_state_dict", ScaleError, **kinds)
    host = {**initial_host(rule), **counters, "scale": _bounded(rule, scale)}
    host["slack"] = min(host["slack"], rule.hysteresis - 1)
    host["good"] = min(tracker, rule.interval - 1)  # torch never grows again from a tracker past the interval
    return rule, host


def _bounded(rule: ScaleRule, scale: float) -> float:
    """Return a saved scale as a number of the rule's format within its bounds; warn if it is another one."""
    bounded = min(max(scale, rule.floor), rule.ceiling)
    if fp32(bounded) == 0.0:
        raise ScaleError(
            f"load_state_dict: scale={scale!r} is 0 in fp32, so every gradient would be 0 or NaN; load it into a "
            "scaler with a floor, or start without loading"
        )
    if representable(rule, bounded) != representable(rule, scale):  # a bound may be a number that fp32 does not hold
        warn(
            f"load_state_dict: scale={scale!r} is outside [{rule.floor!r}, {rule.ceiling!r}]; going on with "
            f"{bounded!r}. Pass floor= and ceiling= to GradScaler to keep it"
        )
    return representable(rule, bounded)
