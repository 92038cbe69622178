"""The engines, and their loss scales, which are computed; what becomes of all other fields is in ``NAME.toml``."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from halfstep.policy.engines.engine import Engine, Expressed
from halfstep.policy.scale_rule import FP32_MAX, SCALE_RULES, ScaleRule

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

EXACT_BY_VALUE = frozenset({"divide", "kept"})
"""Fields of a `ScaleRule` that change no number where the factors are powers of two, as those of all engines are."""

TINY = 2.0**-126
"""The smallest normal fp32 number, in place of a floor of 0, which Megatron refuses."""

SETTABLE = {
    "deepspeed": frozenset({"init", "interval", "hysteresis", "refill", "floor"}),
    "megatron": frozenset({"init", "interval", "hysteresis", "floor"}),
}
"""Fields of a `ScaleRule` that an engine's configuration has."""


def _rule(policy: Policy, own: str) -> ScaleRule | float:
    """Return the rule of a resolved policy's scale, the engine's `own` for "auto", or the number of a static one."""
    if isinstance(policy.scale, float) or policy.scale == "none":
        return policy.scale if isinstance(policy.scale, float) else 1.0
    rule = policy.scale if isinstance(policy.scale, ScaleRule) else SCALE_RULES[own]
    return rule.init if rule.is_static else rule


def _dynamic(
    policy: Policy, rule: ScaleRule, own: str, scaler: str, settings: Mapping[str, Any], differences: list[str]
) -> Expressed:
    """Return a dynamic scale by the fields of `settings`, and what else of `rule` the engine's own rule has not."""
    theirs = SCALE_RULES[own]
    others = [
        f"{name} {_figures(getattr(theirs, name))} in place of {_figures(getattr(rule, name))}"
        for name in (f.name for f in dataclasses.fields(ScaleRule))
        if name not in EXACT_BY_VALUE | SETTABLE[own] and getattr(rule, name) != getattr(theirs, name)
    ]
    lost = f"{scaler} has {', '.join(others + differences)}; set scale={own!r}" if others + differences else ""
    return Expressed(
        field="scale", settings=settings, note=f"the rule {own!r}" if policy.scale == "auto" else "", lost=lost
    )


def _figures(value: object) -> str:
    if value == FP32_MAX:
        return "none"
    return f"{value:.10g}" if isinstance(value, float) else repr(value)


def _deepspeed_scale(policy: Policy) -> Expressed | None:
    if policy.params == "fp32" or policy.dtype != "fp16":
        return None
    rule = _rule(policy, "deepspeed")
    if isinstance(rule, float):
        return Expressed(field="scale", settings={"fp16.loss_scale": rule})
    power, floor = round(math.log2(rule.init)), max(1, round(rule.floor))
    differences = []
    if 2.0**power != rule.init:
        differences.append(f"init {_figures(2.0**power)} in place of {_figures(rule.init)}")
    if floor != rule.floor:
        differences.append(f"floor {floor} in place of {_figures(rule.floor)}")
    settings = {
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": power,
        "fp16.loss_scale_window": rule.interval,
        "fp16.hysteresis": rule.hysteresis,
        "fp16.consecutive_hysteresis": rule.refill == "good",
        "fp16.min_loss_scale": floor,
    }
    return _dynamic(policy, rule, "deepspeed", "DynamicLossScaler", settings, differences)


def _megatron_scale(policy: Policy) -> Expressed | None:
    if policy.scale in ("none", 1.0) and policy.dtype != "fp16":
        return None
    rule = _rule(policy, "megatron")
    if isinstance(rule, float):
        note = "a gradient that is not finite ends the run, unless --no-check-for-nan-in-loss-and-grad is given"
        return Expressed(field="scale", settings={"loss_scale": rule}, note=note)
    if policy.dtype != "fp16":
        return Expressed(field="scale", lost=f"no dynamic loss scale under {policy.dtype}; set scale='none'")
    settings = {
        "initial_loss_scale": float(rule.init),
        "min_loss_scale": float(rule.floor or TINY),
        "loss_scale_window": rule.interval,
        "hysteresis": rule.hysteresis,
    }
    differences = [] if rule.floor else ["floor 2**-126 in place of 0"]
    return _dynamic(policy, rule, "megatron", "DynamicGradScaler", settings, differences)


def _megatron_option(key: str, value: Any) -> tuple[str, ...]:
    option = f"--{key.replace('_', '-')}"
    return (option,) if value is True else (option, str(value))


def _toml(config: dict[str, Any], args: tuple[str, ...]) -> str:
    lines = []
    for section, values in config.items():
        lines += [f"[{section}]", *(f'{key} = "{value}"' for key, value in values.items())]
    return "\n".join(lines)


_ENGINES = (
    Engine(
        key="deepspeed",
        name="DeepSpeed",
        scale=_deepspeed_scale,
        arguments=lambda key, value: (),
        text=lambda config, args: json.dumps(config, indent=2),
    ),
    Engine(
        key="megatron",
        name="Megatron-LM",
        scale=_megatron_scale,
        arguments=_megatron_option,
        text=lambda config, args: shlex.join(args),
    ),
    Engine(
        key="torchtitan",
        name="torchtitan",
        scale=lambda policy: None,
        arguments=lambda key, value: (f"--{key}={value}",),
        text=_toml,
    ),
)

ENGINES: Mapping[str, Engine] = MappingProxyType({engine.key: engine for engine in _ENGINES})
"""Engines by the name of their command line."""
