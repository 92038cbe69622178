"""Plan: what was decided for one model on one device, with the reason of every decision. `resolve` makes it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.policy.policy import Policy
from halfstep.policy.rule_kinds import RULES

__all__ = ["Decision", "ModuleDecision", "ParameterDecision", "Plan"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The rule of one operator.

    Attributes:
        rule: "low", "fp32", "keep", "widest" or "banned".
        origin: what decided: "table", "residual", "loss" or "ops" of the policy, or "operator": its own @hs.operator.
        reason: why, in words.
    """

    rule: str
    origin: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDecision:
    """The rule of one module.

    Attributes:
        path: dotted name, "" for the root.
        kind: name of its class.
        rule: "low", "fp32", "keep", or "" where operators follow their own rules.
        format: what its operators compute in: a format's name, "input", or "" where operators follow their own rules.
        reason: which pattern decided, in words.
    """

    path: str
    kind: str
    rule: str
    format: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDecision:
    """The format of one parameter.

    Attributes:
        name: dotted name, the first one of a parameter that several modules share.
        format: "fp32", "bf16" or "fp16".
        low: whether the policy lowers it, so that its fp32 value is where `Policy.master` puts it.
        numel: number of its elements.
        reason: why, in words.
        aliases: its other dotted names.
    """

    name: str
    format: str
    low: bool
    numel: int
    reason: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a policy means for one model on one device.

    Attributes:
        policy: the policy with no "auto" left.
        device: the device type decided for.
        model: name of the model's class.
        modules: every module's rule, the root first.
        parameters: the format of every fp32, bf16 and fp16 parameter.
        operators: (operator, decision) for every operator with a rule, sorted by name.
        notes: warnings and explanations.
        masters: in words, what ``master="auto"`` becomes with which optimizer, where that was not known; else "".

    Examples:
        >>> plan = hs.resolve(hs.Policy.of("O2", dtype="bf16"), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
        >>> [(parameter.name, parameter.format) for parameter in plan.parameters]
        [('0.weight', 'bf16'), ('0.bias', 'bf16'), ('1.weight', 'fp32'), ('1.bias', 'fp32')]
    """

    policy: Policy
    device: str
    model: str
    modules: tuple[ModuleDecision, ...]
    parameters: tuple[ParameterDecision, ...]
    operators: tuple[tuple[str, Decision], ...]
    notes: tuple[str, ...] = ()
    masters: str = ""

    def __str__(self) -> str:
        """Return the plan as readable text."""
        return "\n".join(_lines(self))


def _lines(plan: Plan) -> Iterator[str]:
    policy = plan.policy
    yield f"plan: {plan.model} on {plan.device} under policy {policy.name or repr(policy)!r}"
    master = f"auto: {plan.masters}" if plan.masters else policy.master
    yield from _wrapped(f"low format {policy.dtype}, scale {_scale_words(policy)}, master {master}")
    yield from (line for note in plan.notes for line in _wrapped(f"note: {note}"))
    yield from _parameter_lines(plan)
    ruled = [m for m in plan.modules if m.rule]
    yield f"modules: {len(ruled)} of {len(plan.modules)} have a rule"
    for module in ruled:
        yield f"  {module.path or '(root)'} ({module.kind}): {module.rule} because {module.reason}"
    yield f"operators: {len(plan.operators)} have a rule, the others run in their inputs' format"
    for rule in RULES:
        names = [name for name, decision in plan.operators if decision.rule == rule]
        if names:
            yield from _wrapped(f"{rule}: {', '.join(names)}")


def _parameter_lines(plan: Plan) -> Iterator[str]:
    total = sum(p.numel for p in plan.parameters)
    yield f"parameters: {total:,} in {len(plan.parameters)} tensors"
    groups: dict[tuple[str, str], list[ParameterDecision]] = {}
    for parameter in plan.parameters:
        groups.setdefault((parameter.format, parameter.reason), []).append(parameter)
    for (name, reason), members in groups.items():
        count = sum(p.numel for p in members)
        few = ", ".join(p.name for p in members[:3]) + (", ..." if len(members) > 3 else "")
        yield from _wrapped(f"{name}: {count:,} ({few}): {reason}")


def _scale_words(policy: Policy) -> str:
    if isinstance(policy.scale, (str, float)):
        return str(policy.scale)
    return f"dynamic from {policy.scale.init:g} in [{policy.scale.floor:g}, {policy.scale.ceiling:g}]"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
