"""A scale rule and its state: chosen, read, set, saved and loaded; numbers on the host until there are tensors.

The checkpoint has torch's five keys, and one of our own for what torch does not keep.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.arguments import COUNT, NOT_NEGATIVE, POSITIVE, Kind, a, check, one_of
from halfstep.errors import ScaleError, warn
from halfstep.mistakes import MISTAKES
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule, plain, steps_from, whole
from halfstep.scale.rule import (
    ScaleState,
    check_scale,
    fp32,
    initial_host,
    load_host,
    representable,
    set_scale_,
    state_to_host,
)

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
        """Set the scale by hand; a tensor makes the state on its own device if there is none yet."""
        if isinstance(value, Tensor):
            set_scale_(self._rule, self._state_on(value.device), value)
            return
        value = plain(value)
        if self._state is not None:
            set_scale_(self._rule, self._state, value)
        else:
            check_scale(self._rule, value)
            self._host["scale"] = representable(self._rule, value)


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
