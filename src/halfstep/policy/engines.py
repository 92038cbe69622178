"""A policy as an engine's configuration: `configured` takes an `Engine` and a `Policy`, and returns an `EngineConfig`.

Every field of a policy gets one `Expressed`: the settings that carry it out, and what differs. Two kinds of difference
are kept apart. *Lost*: the engine computes less precisely than the field asks for, or leaves a safeguard out; that is
an error unless the caller accepts the field by name. A *note*: the engine is at least as precise (at other costs), or
leaves the work to the training loop, where an omission raises an error. Loss scales are computed here; what becomes of
all other fields is in ``tables/NAME.toml``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from halfstep.errors import PolicyError, did_you_mean
from halfstep.formats import DTYPES
from halfstep.policy.operators import NO_LOW_KERNEL, data, losses, table
from halfstep.policy.resolve import holds, operator_rules, resolved
from halfstep.policy.scale_rule import FP32_MAX, SCALE_RULES, ScaleRule

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

DEVICE = "cuda"
"""The device type that engines' configurations are written for: fp16 has units there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expressed:
    """What becomes of one field of a policy in an engine; the words are "" where there is nothing to say."""

    field: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys with dots; {}: its defaults are right
    note: str = ""  # what the engine does otherwise without losing precision
    lost: str = ""  # what the field asks for and the engine does not do, with the remedy


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An engine that policies are written for: ``tables/KEY.toml`` says what becomes of each field.

    Attributes:
        key: its name on the command line and in the method of `Policy` that writes its configuration.
        name: what it is called.
        scale: resolved policy -> what becomes of its loss scale, None where the table says it; ``scale="auto"`` is
            left in the policy, and means the engine's rule.
        arguments: (key, value) -> its words on the engine's command line; none where only a file is read.
        text: (configuration, arguments) -> the text of the engine's file or command line.
    """

    key: str
    name: str
    scale: Callable[[Policy], Expressed | None]
    arguments: Callable[[str, Any], tuple[str, ...]]
    text: Callable[[dict[str, Any], tuple[str, ...]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The part of an engine's configuration that a policy decides; ``str()`` is the text of its file or command line.

    Attributes:
        engine: name of the engine.
        config: its configuration, sections as nested dicts: merge it with your own.
        args: the same as words of its command line; empty for DeepSpeed, which reads a file or a dict.
        text: JSON for DeepSpeed, arguments for Megatron-LM, TOML for torchtitan.
        notes: "field=value: what the engine does otherwise", including the losses that were accepted.
    """

    engine: str
    config: dict[str, Any]
    args: tuple[str, ...]
    text: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Return the text, which has no notes."""
        return self.text


def expressed(engine: Engine, policy: Policy) -> tuple[Expressed, ...]:
    """Return what becomes of every field of `policy` in `engine`, in the fields' order."""
    label = f"policy {policy.name!r}: dtype={policy.dtype!r}"
    if policy.dtype == "auto":
        raise PolicyError(
            f"{label} is decided by the device that trains, and a configuration of "
            f"{engine.name} is written before; name the format: policy.replace(dtype='bf16') or 'fp16'"
        )
    if policy.dtype not in DTYPES:
        raise PolicyError(
            f"{label} is simulated by halfstep's regions, which {engine.name} does not run; use dtype='bf16' or 'fp16'"
        )
    concrete, rows = resolved(policy, DEVICE), data(f"tables/{engine.key}.toml")
    if policy.dtype in rows.get("refused", ()):
        raise PolicyError(f"{label}, and {rows['refused'][policy.dtype]}")
    if policy.scale == "auto":
        concrete = concrete.replace(scale="auto" if policy.dtype == "fp16" else "none")
    found = {name: Expressed(field=name) for name in rows["fields"]}
    known = _facts(concrete)
    for row in rows["row"]:
        if holds(row["when"], known):
            found[row["field"]] = _joined(found[row["field"]], row, known)
    if (scale := engine.scale(concrete)) is not None:
        found["scale"] = scale
    return tuple(found[f.name] for f in dataclasses.fields(policy))


def _facts(policy: Policy) -> dict[str, Any]:
    """Return what rows of tables ask for and their texts name: the fields of a resolved policy, and what follows."""
    rows, own = table(policy.table, DEVICE), table("torch", DEVICE)
    # losses belong to the field `loss`, and operators without low kernels raise without a rule
    wide = [
        op for op, row in rows.items() if row.rule == "fp32" and NO_LOW_KERNEL not in row.kind and op not in losses()
    ]
    ruled = type(policy)(table=policy.table, ops=policy.ops, loss=policy.loss)  # what decides; rules are cached by it
    rules = operator_rules(ruled, DEVICE)
    return {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)} | {
        "lowered": policy.dtype != "fp32",
        "scaled": policy.scale not in ("none", 1.0),
        "wide": _in_words(wide),
        "lacking": _in_words([op for op in wide if op not in own or own[op].rule != "fp32"]),
        **{op: op in rules and rules[op].rule == "fp32" for op in ("softmax", "cross_entropy")},
    }


def _in_words(operators: Sequence[str]) -> str:
    """Return how many operators there are, and the first three; "" for none."""
    more = ", ..." if len(operators) > 3 else ""
    return f"{len(operators)} operators ({', '.join(operators[:3])}{more})" if operators else ""


def _joined(made: Expressed, row: Mapping[str, Any], known: Mapping[str, Any]) -> Expressed:
    settings = {
        key.format(**known): value.format(**known) if isinstance(value, str) else value
        for key, value in row.get("settings", {}).items()
    }
    texts = {kind: row.get(kind, "").format(**known) or getattr(made, kind) for kind in ("note", "lost")}
    return Expressed(field=made.field, settings={**made.settings, **settings}, **texts)


def configured(engine: Engine, policy: Policy, accept: Iterable[str] = ()) -> EngineConfig:
    """Return the configuration of `engine` that carries `policy` out, `accept` being fields whose loss is accepted."""
    accepted = (accept,) if isinstance(accept, str) else tuple(accept)
    fields = [f.name for f in dataclasses.fields(policy)]
    for name in accepted:
        if name not in fields:
            hint = did_you_mean(name, fields)
            raise PolicyError(f"to_{engine.key}(accept={list(accepted)!r}): a policy has no field {name!r}{hint}")
    made = expressed(engine, policy)
    lost = [e for e in made if e.lost and e.field not in accepted]
    if lost:
        lines = "\n".join(f"  {_value(policy, e.field)}: {e.lost}" for e in lost)
        raise PolicyError(
            f"policy {policy.name!r}: {engine.name} does not carry out {len(lost)} of its fields:\n{lines}\n"
            f"change them, or accept the loss: to_{engine.key}(accept={[*accepted, *(e.field for e in lost)]!r})"
        )
    settings = {key: value for e in made for key, value in e.settings.items()}
    config = _nested(settings)
    args = tuple(word for key, value in settings.items() for word in engine.arguments(key, value))
    return EngineConfig(
        engine=engine.name,
        config=config,
        args=args,
        text=engine.text(config, args),
        notes=tuple(f"{_value(policy, e.field)}: {text}" for e in made for text in (e.note, e.lost) if text),
    )


def _value(policy: Policy, name: str) -> str:
    return f"{name}={getattr(policy, name)!r}"


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return made


# ------------------------------------------------------------------ the engines, and their loss scales

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


def _as_toml(config: dict[str, Any], args: tuple[str, ...]) -> str:
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
        text=_as_toml,
    ),
)

ENGINES: Mapping[str, Engine] = MappingProxyType({engine.key: engine for engine in _ENGINES})
"""Engines by the name of their command line."""
