"""The scaler's checkpoint: torch's five keys, and one of our own for what torch does not keep."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import MAX_COUNT, ScaleRule, plain, whole
from halfstep.scale.rule import fp32, initial_host, kept

__all__ = ["host_from_state_dict", "rule_from_state_dict", "state_dict_from"]

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_OWN_KEY = "halfstep"  # torch's load_state_dict ignores keys it does not know
_OWN_COUNTERS = ("slack", "steps", "misses", "streak", "bad")


def state_dict_from(rule: ScaleRule, host: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint of plain numbers.

    Args:
        rule: the numbers in force; floor, ceiling and the like are not saved, they belong to whoever makes the scaler.
        host: the state as `halfstep.scale.rule.state_to_host` gives it.
    """
    values = (host["scale"], rule.growth, rule.backoff, rule.interval, host["good"])
    return {
        **dict(zip(_TORCH_KEYS, values, strict=True)),
        _OWN_KEY: {name: host[name] for name in _OWN_COUNTERS},
    }


def rule_from_state_dict(rule: ScaleRule, state: Mapping[str, Any]) -> ScaleRule:
    """Return `rule` with growth, backoff and interval of a checkpoint.

    Raises:
        ScaleError: the checkpoint is empty, lacks a key, or its numbers make no rule.
    """
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
        return dataclasses.replace(
            rule,
            growth=state["growth_factor"],
            backoff=state["backoff_factor"],
            interval=state["growth_interval"],
        )
    except ScaleError as error:
        raise ScaleError(f"load_state_dict: {error}") from error


def host_from_state_dict(rule: ScaleRule, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a checkpoint as `halfstep.scale.rule.load_host` takes it.

    Args:
        rule: the rule it will run under, as `rule_from_state_dict` gave it.
        state: a checkpoint of ours or of torch's, with torch's keys present.

    Returns:
        A new dict; a scale outside floor and ceiling is brought inside with a warning.

    Raises:
        ScaleError: a value of the wrong type or one that cannot be.
    """
    host = initial_host(rule)
    tracker = _count("_growth_tracker", state["_growth_tracker"], low=-rule.delay)
    own = state.get(_OWN_KEY, {})
    if not isinstance(own, Mapping):
        raise ScaleError(f"load_state_dict: {_OWN_KEY!r} is {own!r}; expected a dict of counters")
    host.update({name: _count(name, own[name], low=0) for name in _OWN_COUNTERS if name in own})
    host["slack"] = min(host["slack"], rule.hysteresis - 1)
    host["good"] = min(tracker, rule.interval - 1)  # torch never grows again from a tracker past the interval
    host["scale"] = _bounded(rule, state["scale"])
    return host


def _bounded(rule: ScaleRule, scale: Any) -> float:
    """Return a saved scale as an fp32 number within the rule's bounds."""
    scale = plain(scale)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale < 0:
        raise ScaleError(f"load_state_dict: scale={scale!r}; expected a finite number, at least 0")
    bounded = min(max(scale, rule.floor), rule.ceiling)
    if fp32(bounded) == 0.0:
        raise ScaleError(
            f"load_state_dict: scale={scale!r} is 0 in fp32, so every gradient would be 0 or NaN; load it into a "
            "scaler with a floor, or start without loading"
        )
    if kept(rule, bounded) != kept(rule, scale):  # a bound may be a number that fp32 does not hold
        warnings.warn(
            f"load_state_dict: scale={scale!r} is outside [{rule.floor!r}, {rule.ceiling!r}]; going on with "
            f"{bounded!r}. Pass floor= and ceiling= to GradScaler to keep it",
            stacklevel=4,
        )
    return kept(rule, bounded)


def _count(name: str, value: Any, *, low: int) -> int:
    value = whole(plain(value))
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_COUNT:
        raise ScaleError(f"load_state_dict: {name}={value!r}; expected a whole number in [{low}, {MAX_COUNT}]")
    return value
