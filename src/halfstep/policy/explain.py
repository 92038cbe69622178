"""Explain: which rule decides, and why; and what differs between two policies. Both as text, one fact a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from halfstep.errors import PolicyError, did_you_mean
from halfstep.policy.match import CLASS_PREFIX, glob_covers
from halfstep.policy.operators import custom_rule, is_custom, operator_names
from halfstep.policy.resolve import Decision, custom_decisions, operator_rules
from halfstep.policy.scale_rule import ScaleRule

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

DEVICES = ("cpu", "cuda")
"""Device types whose rules may differ: torch.autocast has one list for the CPU and one for accelerators."""


def explain(policy: Policy, what: str) -> str:
    """Return which rule decides for an operator, an operator pattern, a module path or a ``class:`` pattern, and why.

    A word that names an operator is taken as one; a dotted path, "" (the root) or ``class:X`` as modules, which are not
    looked up in any model.
    """
    label = f"policy {policy.name!r}" if policy.name else repr(policy)
    return "\n".join([label, *_lines(policy, what)])


def _lines(policy: Policy, what: str) -> Iterator[str]:
    of_modules = what == "" or what.startswith(CLASS_PREFIX)
    if is_custom(what) and not of_modules:
        yield from _custom_lines(policy, what)
        return
    covered = any(glob_covers(pattern, what) for pattern, _ in policy.modules)
    try:
        for op in () if of_modules else operator_names(what):
            yield from _operator_lines(policy, op)
    except PolicyError:
        if "." not in what and not covered:
            raise
        of_modules = True
    if of_modules or covered:
        yield from _module_lines(policy, what)


def _operator_lines(policy: Policy, op: str) -> Iterator[str]:
    decisions = {device: operator_rules(policy, device).get(op) for device in DEVICES}
    first = decisions[DEVICES[0]]
    if all(decision == first for decision in decisions.values()):
        yield f"operator {op}: {_words(policy, first)}"
    else:
        for device, decision in decisions.items():
            yield f"operator {op} on {device}: {_words(policy, decision)}"
    overruled = [pair for pair in policy.ops if not is_custom(pair[0]) and op in operator_names(pair[0])][:-1]
    for pattern, rule in overruled:
        yield f"  overruled: ops {pattern!r} = {rule!r} (a later entry matches)"


def _custom_lines(policy: Policy, what: str) -> Iterator[str]:
    own = custom_decisions(policy.ops)
    named = [name for name in own if custom_rule(((what, "found"),), name, "")]
    if not named:
        raise PolicyError(f"no custom operator {what!r} is registered{did_you_mean(what, own)}; @hs.operator does that")
    for name in named:
        yield f"operator {name}: {own[name].rule}, decided by {own[name].reason}"


def _words(policy: Policy, decision: Decision | None) -> str:
    if decision is None:
        return f"no rule: runs in its inputs' format (table {policy.table!r} and the other fields have none)"
    by = f"table {policy.table!r}" if decision.origin == "table" else f"field {decision.origin!r}"
    return f"{decision.rule}, decided by {by}\n  because {decision.reason}"


def _module_lines(policy: Policy, what: str) -> Iterator[str]:
    matching = [pair for pair in policy.modules if glob_covers(pair[0], what)]
    shown = what or "(root)"
    if matching:
        pattern, rule = matching[-1]
        yield f"module {shown}: {rule}, decided by field 'modules'"
        yield f"  because {pattern!r} = {rule!r} is the last pattern that matches it or a module around it"
    else:
        yield f"module {shown}: no rule of its own: operators in it follow their own rules"
    for pattern, rule in matching[:-1]:
        yield f"  overruled: {pattern!r} = {rule!r} (a later entry matches)"
    if not what.startswith(CLASS_PREFIX):
        after = policy.modules[policy.modules.index(matching[-1]) + 1 :] if matching else policy.modules
        for pattern, rule in after:
            if pattern.startswith(CLASS_PREFIX):
                yield f"  unless its class matches: {pattern!r} = {rule!r} (halfstep.resolve(policy, model) shows it)"


def diff(mine: Policy, other: Policy) -> str:
    """Return what differs, a line each: fields as ``name: mine -> other's``, operators as ``mine -> other's: names``.

    "input" stands for no rule; " on cuda" or " on cpu" follows a name if only that device differs. "" = no difference.
    """
    lines = []
    for field in dataclasses.fields(mine):
        left, right = getattr(mine, field.name), getattr(other, field.name)
        if isinstance(left, ScaleRule) and isinstance(right, ScaleRule):
            for part in dataclasses.fields(ScaleRule):
                a, b = getattr(left, part.name), getattr(right, part.name)
                if a != b:
                    lines.append(f"{field.name}.{part.name}: {a!r} -> {b!r}")
        elif left != right:
            lines.append(f"{field.name}: {left!r} -> {right!r}")
    changed: dict[tuple[str, str], dict[str, list[str]]] = {}
    for device in DEVICES:
        left_rules = {**operator_rules(mine, device), **custom_decisions(mine.ops)}
        right_rules = {**operator_rules(other, device), **custom_decisions(other.ops)}
        for op in sorted(left_rules.keys() | right_rules.keys()):
            change = _rule(left_rules.get(op)), _rule(right_rules.get(op))
            if change[0] != change[1]:
                changed.setdefault(change, {}).setdefault(op, []).append(device)
    for (before, after), operators in sorted(changed.items()):
        names = [op if len(on) == len(DEVICES) else f"{op} on {on[0]}" for op, on in operators.items()]
        lines.append(f"{before} -> {after}: {', '.join(names)}")
    return "\n".join(lines)


def _rule(decision: Decision | None) -> str:
    return "input" if decision is None else decision.rule
