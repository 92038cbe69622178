"""Arguments of a scaler: a scale rule from its numbers, a device type, and nested containers of losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.arguments import COUNT, check
from halfstep.errors import ScaleError, did_you_mean
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule, plain
from halfstep.trees import opened

__all__ = ["check_factor", "choose_rule", "device_type", "is_on", "map_losses"]

TORCH_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def choose_rule(
    numbers: Mapping[str, Any],
    rule: ScaleRule | str | None = None,
    *,
    floor: float | None = None,
    ceiling: float | None = None,
    hysteresis: int = 1,
) -> ScaleRule:
    """Return the rule that GradScaler's arguments of the same names describe.

    Args:
        numbers: torch's four numbers, keyed as in `TORCH_DEFAULTS`.
        rule: a rule or the name of one, in place of all four.
        floor: in place of the rule's; default as wide as the first scale needs.
        ceiling: likewise.
        hysteresis: in place of the rule's, unless 1.

    Raises:
        ScaleError: a value that makes no sense, or numbers beside a rule.
    """
    numbers = {name: plain(value) for name, value in numbers.items()}
    floor, ceiling, hysteresis = plain(floor), plain(ceiling), plain(hysteresis)
    chosen = _torch_rule(numbers, floor, ceiling) if rule is None else _given_rule(rule, numbers)
    changes: dict[str, Any] = {}
    if floor is not None:
        changes["floor"] = floor
    if ceiling is not None:
        changes["ceiling"] = ceiling
    check("GradScaler", ScaleError, hysteresis=(hysteresis, COUNT))
    if hysteresis != 1:
        changes["hysteresis"] = hysteresis
    return dataclasses.replace(chosen, **changes)


def is_on(enabled: object) -> bool:
    """Return GradScaler's `enabled` as a bool: bools of any library, 0 and 1."""
    value = plain(enabled)
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ScaleError(f"GradScaler: enabled={enabled!r} is a {type(enabled).__name__}; expected True or False")
    return bool(value)


def device_type(device: str | torch.device | None) -> str | None:
    """Return the type of a device, which must be one of torch's; None means that of the loss."""
    if device is None:
        return None
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ScaleError(
            f"GradScaler: device={device!r} is not a device; expected a type such as 'cuda' or 'cpu'"
        ) from error


def _torch_rule(numbers: Mapping[str, Any], floor: float | None, ceiling: float | None) -> ScaleRule:
    """Return the rule for torch's four numbers, with default bounds wide enough for the first scale."""
    for name in ("growth_factor", "backoff_factor"):
        check_factor(name, numbers[name])
    init = numbers["init_scale"]
    bounds: dict[str, Any] = {}
    if isinstance(init, (int, float)) and math.isfinite(init) and init > 0:
        default = SCALE_RULES["halfstep"]
        bounds["floor"] = min(default.floor, init) if floor is None else floor
        bounds["ceiling"] = max(default.ceiling, init) if ceiling is None else ceiling
    return ScaleRule(
        init=init,
        growth=numbers["growth_factor"],
        backoff=numbers["backoff_factor"],
        interval=numbers["growth_interval"],
        **bounds,
    )


def _given_rule(rule: ScaleRule | str, numbers: Mapping[str, Any]) -> ScaleRule:
    """Return a rule given as such or by name, alone."""
    beside = [name for name, value in numbers.items() if value != TORCH_DEFAULTS[name]]
    if beside:
        raise ScaleError(
            f"GradScaler: {', '.join(beside)} given beside rule=; put the numbers into the rule, "
            "dataclasses.replace(rule, ...) makes one with other numbers"
        )
    if isinstance(rule, ScaleRule):
        return rule
    if not isinstance(rule, str) or rule not in SCALE_RULES:
        near = did_you_mean(rule, SCALE_RULES) if isinstance(rule, str) else ""
        raise ScaleError(f"GradScaler: rule={rule!r}; expected a ScaleRule or one of {', '.join(SCALE_RULES)}{near}")
    return SCALE_RULES[rule]


def check_factor(name: str, value: object) -> None:
    """Raise ScaleError unless a factor, a plain number, is in the range that torch requires."""
    low, high, example = (1.0, math.inf, "2.0") if name == "growth_factor" else (0.0, 1.0, "0.5")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
        raise ScaleError(
            f"GradScaler: {name}={value!r}; expected a number above {low} and below {high}, {example} is usual "
            "(a scale that stays: rule=ScaleRule.static(value))"
        )


def map_losses(value: Any, function: Callable[[Tensor], Tensor], where: str = "outputs") -> Any:
    """Return `value` with every tensor replaced by ``function(tensor)``.

    Args:
        value: a tensor, or containers (or other iterables) of such, nested at will. Containers come back as their own
            type (a generator as a list); the input is not changed.
        function: called with each tensor.
        where: how a message names `value`.

    Raises:
        ScaleError: something that is neither a tensor nor a container; the message names the place.
    """
    if isinstance(value, Tensor):
        return function(value)
    if (node := opened(value)) is not None:
        named, rebuild = node
        return rebuild([map_losses(item, function, where + place) for place, item in named])
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [map_losses(item, function, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ScaleError(
        f"scale: {where} is {value!r} of type {type(value).__name__}; expected a tensor or a (nested) container of "
        "tensors: pass the loss itself, or only the tensors of what the model returned"
    )
