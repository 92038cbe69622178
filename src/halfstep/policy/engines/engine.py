"""A policy as an engine's configuration: `configured` takes an `Engine` and a `Policy`, and returns an `EngineConfig`.

Every field of a policy gets one `Expressed`: the settings that carry it out, and what differs. Two kinds of difference
are kept apart. *Lost*: the engine computes less precisely than the field asks for, or leaves a safeguard out; that is
an error unless the caller accepts the field by name. A *note*: the engine is at least as precise (at other costs), or
leaves the work to the training loop, where an omission raises an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.errors import PolicyError, did_you_mean
from halfstep.formats import DTYPES
from halfstep.policy.optable import NO_LOW_KERNEL, losses, table
from halfstep.policy.resolve import resolved
from halfstep.policy.scale_rule import FP32_MAX, ScaleRule

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

__all__ = [
    "Engine",
    "EngineConfig",
    "Expressed",
    "configured",
    "expressed",
    "in_words",
    "rule_differences",
    "wide_operators",
]

DEVICE = "cuda"
"""The device type that engines' configurations are written for: fp16 has units there."""

EXACT_BY_VALUE = frozenset({"divide", "kept"})
"""Fields of a `ScaleRule` that change no number where the factors are powers of two, as those of all engines are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expressed:
    """What becomes of one field of a policy in an engine.

    Attributes:
        field: the field.
        settings: key of the engine's configuration -> value, sections with dots; {} where its default is right.
        note: what the engine does otherwise without losing precision; "" if nothing.
        lost: what the field asks for and the engine does not do, with the remedy; "" if nothing.
    """

    field: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    lost: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An engine that policies are written for.

    Attributes:
        name: what it is called.
        method: the method of `Policy` that writes its configuration.
        express: resolved policy -> an `Expressed` for every field; ``scale="auto"`` stays, and means the engine's rule.
        arguments: (key, value) -> its words on the engine's command line; none where only a file is read.
        text: (configuration, arguments) -> the text of the engine's file or command line.
    """

    name: str
    method: str
    express: Callable[[Policy], Iterator[Expressed]]
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
    """Return what becomes of every field of `policy` in `engine`, in the fields' order.

    Raises:
        PolicyError: the low format is "auto", simulated, or none of the engine's; or a field rules out another one.
    """
    if policy.dtype == "auto":
        raise PolicyError(
            f"policy {policy.name!r}: dtype='auto' is decided by the device that trains, and a configuration of "
            f"{engine.name} is written before; name the format: policy.replace(dtype='bf16') or 'fp16'"
        )
    if policy.dtype not in DTYPES:
        raise PolicyError(
            f"policy {policy.name!r}: dtype={policy.dtype!r} is simulated by halfstep's regions, which {engine.name} "
            "does not run; use dtype='bf16' or 'fp16'"
        )
    concrete = resolved(policy, DEVICE)
    if policy.scale == "auto":
        concrete = concrete.replace(scale="auto" if policy.dtype == "fp16" else "none")
    found = {made.field: made for made in engine.express(concrete)}
    return tuple(found[f.name] for f in dataclasses.fields(policy))


def configured(engine: Engine, policy: Policy, accept: Iterable[str] = ()) -> EngineConfig:
    """Return the configuration of `engine` that carries `policy` out.

    Args:
        engine: what trains.
        policy: what is wanted; its low format has a name.
        accept: fields whose loss is accepted.

    Raises:
        PolicyError: see `expressed`; the engine cannot carry out a field that is not in `accept` (the message has a
            line with the remedy for each); `accept` names no field.
    """
    accepted = (accept,) if isinstance(accept, str) else tuple(accept)
    fields = [f.name for f in dataclasses.fields(policy)]
    for name in accepted:
        if name not in fields:
            hint = did_you_mean(name, fields)
            raise PolicyError(f"{engine.method}(accept={list(accepted)!r}): a policy has no field {name!r}{hint}")
    made = expressed(engine, policy)
    lost = [e for e in made if e.lost and e.field not in accepted]
    if lost:
        lines = "\n".join(f"  {_value(policy, e.field)}: {e.lost}" for e in lost)
        raise PolicyError(
            f"policy {policy.name!r}: {engine.name} does not carry out {len(lost)} of its fields:\n{lines}\n"
            f"change them, or accept the loss: {engine.method}(accept={[*accepted, *(e.field for e in lost)]!r})"
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


def wide_operators(policy: Policy, besides: frozenset[str] = frozenset()) -> list[str]:
    """Return the operators that the policy's table computes in fp32 for precision, but for `besides`.

    Losses belong to the field `loss`. Operators that torch cannot compute in low formats raise without a rule.
    """
    rows, others = table(policy.table, DEVICE), losses() | besides
    return [op for op, row in rows.items() if row.rule == "fp32" and NO_LOW_KERNEL not in row.kind and op not in others]


def in_words(operators: list[str]) -> str:
    """Return how many operators there are, and the first three, for a message."""
    return f"{len(operators)} operators ({', '.join(operators[:3])}{', ...' if len(operators) > 3 else ''})"


def rule_differences(rule: ScaleRule, own: ScaleRule, settable: Iterable[str]) -> list[str]:
    """Return the fields in which `rule` differs from an engine's `own`, but for those that can be set: texts."""
    left_out = {*settable, *EXACT_BY_VALUE}
    return [
        f"{f.name} {in_figures(getattr(own, f.name))} in place of {in_figures(getattr(rule, f.name))}"
        for f in dataclasses.fields(ScaleRule)
        if f.name not in left_out and getattr(rule, f.name) != getattr(own, f.name)
    ]


def in_figures(value: object) -> str:
    """Return a number of a `ScaleRule` for a message."""
    if value == FP32_MAX:
        return "none"
    return f"{value:.10g}" if isinstance(value, float) else repr(value)


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
