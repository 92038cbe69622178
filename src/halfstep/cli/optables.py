"""Tables of a policy: operators and their rules, what differs between two policies, a model's modules and parameters.

On a terminal operators that share rule and reason share a row; elsewhere each has its own, so that lines can be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

import halfstep as hs
from halfstep.cli.numbers import counted
from halfstep.cli.terminal import say, table
from halfstep.formats import DTYPES

__all__ = [
    "Changed", "RULES", "Ruled", "ordered", "print_changes", "print_fields", "print_head", "print_operators",
    "print_parameters", "print_ruled_modules",
]  # fmt: skip

RULES = ("low", "fp32", "keep", "widest", "banned", "")
MEANINGS = {
    "low": "arguments and result in {low}",
    "fp32": "arguments and result in fp32",
    "keep": "the first activation decides, the other arguments take its format",
    "widest": "fp32 if any argument is fp32, else as they come",
    "banned": "refused with low arguments",
    "": "in the format its arguments come in",
}
COLOURS = {
    "low": "green", "fp8": "green", "fp32": "cyan", "keep": "blue", "widest": "magenta", "banned": "red", "": "dim",
}  # fmt: skip
MEGABYTE = 1e6
FEW = 3  # names shown of many


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruled:
    """One operator."""

    operator: str  # its name
    rule: str  # "" for none
    decided_by: str  # the part of the policy that decided, "" for none
    reason: str  # why, with its source
    calls: int = 0  # how often a model called it, 0 if not counted
    gives: tuple[tuple[str, int], ...] = ()  # (format of the result, how often)

    @property
    def group(self) -> tuple[str, str, str]:
        """What operators of one row have in common."""
        return self.rule, self.decided_by, self.reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """One operator under two policies."""

    before: Ruled
    after: Ruled


def ordered(rows: Iterable[Ruled]) -> list[Ruled]:
    """Return `rows` by rule and reason, reasons that many operators share first."""
    rows = list(rows)
    sizes = Counter(row.group for row in rows)
    return sorted(rows, key=lambda row: (RULES.index(row.rule), -sizes[row.group], row.group, row.operator))


def print_head(out: Console, label: str, plan: hs.policy.Plan, *, is_model: bool) -> None:
    """Print what the tables are of."""
    subject = f"{plan.model} under {label} on {plan.device}" if is_model else f"{label} on {plan.device}"
    policy = plan.policy
    facts = [f"low format {policy.dtype}" if policy.dtype != "fp32" else "nothing is lowered"]
    facts += [f"parameters {policy.params}" + (f" with {_masters(plan)}" if policy.params == "low" else "")]
    facts += [f"residual stream {policy.residual}", f"loss scale {_scale(policy)}"]
    facts += ["fp16 emulated"] if policy.emulate == "always" and policy.dtype == "fp16" else []
    say(out, subject, style="bold")
    say(out, ", ".join(facts))


def _masters(plan: hs.policy.Plan) -> str:
    if plan.masters:
        return f"master auto ({plan.masters})"
    return "fp32 masters" if plan.policy.master == "master" else f"master={plan.policy.master}"


def _scale(policy: hs.Policy) -> str:
    scale = policy.scale
    return f"dynamic from {scale.init:g}" if isinstance(scale, hs.ScaleRule) else str(scale)


def print_operators(
    out: Console, rows: Sequence[Ruled], plan: hs.policy.Plan, *, total: int, used: bool, chosen: bool
) -> None:
    """Print operators with their rules; on a terminal a row a reason."""
    say(out)
    if not rows:
        none = f"no operator has a rule (table {plan.policy.table!r}): each runs in the format its arguments come in"
        say(out, "the model calls none of these operators" if used else none)
        return
    if used:
        _print_used(out, rows, plan)
        return
    if not chosen:
        say(out, f"{len(rows)} of {total} operators have a rule, the others run in the format their arguments come in")
    for rule in RULES:
        if any(row.rule == rule for row in rows):
            say(out, f"{rule or 'no rule'}: {MEANINGS[rule].format(low=plan.policy.dtype)}", style=COLOURS[rule])
    if out.is_terminal:
        made = table(out, "rule", "operators", "decided by", "why (source)")
        groups: dict[tuple[str, str, str], list[str]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row.operator)
        for (rule, by, reason), names in groups.items():
            made.add_row(_rule(rule), Text(", ".join(names)), _by(by, plan), Text(reason), end_section=True)
    else:
        made = table(out, "operator", "rule", "decided by", "why (source)")
        for row in rows:
            made.add_row(row.operator, _rule(row.rule), _by(row.decided_by, plan), Text(row.reason))
    out.print(made)


def _print_used(out: Console, rows: Sequence[Ruled], plan: hs.policy.Plan) -> None:
    say(out, "Operators that forward pass and loss call, with the first batch", style="bold")
    made = table(out, "operator", "calls", "rule", "gives", "decided by", "why (source)", right=(1,))
    for row in rows:
        gives = [(plan.policy.dtype if name == "low" else name, times) for name, times in row.gives]
        words = gives[0][0] if len(gives) == 1 else ", ".join(f"{name} {times}" for name, times in gives)
        made.add_row(row.operator, str(row.calls), _rule(row.rule), words, _by(row.decided_by, plan), Text(row.reason))
    out.print(made)


def _rule(rule: str) -> Text:
    return Text(rule or "-", style=COLOURS[rule])


def _by(origin: str, plan: hs.policy.Plan) -> str:
    if origin == "table":
        return f"table {plan.policy.table}"
    return {"": "-", "operator": "@hs.operator"}.get(origin, f"field {origin}")


def print_fields(out: Console, labels: tuple[str, str], fields: Sequence[tuple[str, Any, Any]]) -> None:
    """Print the fields in which two policies differ."""
    if not fields:
        say(out, f"{labels[0]} and {labels[1]}: all fields are the same")
        return
    say(out, f"Fields in which {labels[0]} and {labels[1]} differ", style="bold")
    made = table(out, "field", *labels)
    for name, left, right in fields:
        made.add_row(name, Text(_value(left)), Text(_value(right)))
    out.print(made)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{pattern} = {rule}" for pattern, rule in value) or "-"
    return str(value)


def print_changes(out: Console, labels: tuple[str, str], changes: Sequence[Changed], device: str) -> None:
    """Print the operators whose rule differs; on a terminal a row a pair of rules, elsewhere a row an operator."""
    if not changes:
        say(out, f"operators on {device}: no rule differs")
        return
    say(out)
    count = counted(len(changes), "operator")
    say(out, f"{count} with another rule on {device}; -: no rule, in the format the arguments come in", style="bold")
    if out.is_terminal:
        made = table(out, *labels, "operators")
        groups: dict[tuple[str, str], list[str]] = {}
        for change in changes:
            groups.setdefault((change.before.rule, change.after.rule), []).append(change.before.operator)
        for (before, after), names in groups.items():
            made.add_row(_rule(before), _rule(after), Text(", ".join(names)), end_section=True)
    else:
        made = table(out, "operator", *labels, *(f"why in {label}" for label in labels))
        for change in changes:
            both = (change.before, change.after)
            made.add_row(
                change.before.operator, *(_rule(each.rule) for each in both), *(Text(each.reason) for each in both)
            )
    out.print(made)


def print_ruled_modules(out: Console, plan: hs.policy.Plan) -> None:
    """Print the modules that have a rule; on a terminal those that share one share a row."""
    ruled = [module for module in plan.modules if module.rule]
    say(out)
    if not ruled:
        say(out, f"Modules: none of {len(plan.modules)} has a rule of its own; operators follow theirs", style="bold")
        return
    say(out, f"Modules: {len(ruled)} of {len(plan.modules)} have a rule, which wins over those of operators", "bold")
    made = table(out, "rule", "computes in", "modules", "why")
    groups: dict[tuple[str, str, str], list[str]] = {}
    for module in ruled:
        name = f"{module.path or '(root)'} ({module.kind})"
        groups.setdefault((module.rule, module.format, module.reason), []).append(name)
    for (rule, made_in, reason), names in groups.items():
        for shown in [_few(names)] if out.is_terminal else names:
            made.add_row(_rule(rule), made_in, Text(shown), Text(reason))
    out.print(made)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (f", ... ({len(names)})" if len(names) > FEW else "")


def print_parameters(out: Console, plan: hs.policy.Plan) -> None:
    """Print parameters by format and reason, with their bytes and those of fp32 masters."""
    say(out)
    total = sum(each.numel for each in plan.parameters)
    say(out, f"Parameters: {total:,} in {len(plan.parameters)} tensors", style="bold")
    made = table(out, "format", "tensors", "elements", "MB", "parameters", "why", right=(1, 2, 3))
    groups: dict[tuple[str, str], list[Any]] = {}
    for each in plan.parameters:
        groups.setdefault((each.format, each.reason), []).append(each)
    for (name, reason), members in groups.items():
        count = sum(each.numel for each in members)
        made.add_row(*_sizes(name, len(members), count), Text(_few([each.name for each in members])), Text(reason))
    low = [each for each in plan.parameters if each.low]
    if low and plan.policy.master == "master":
        count = sum(each.numel for each in low)
        why = "master='master': the optimizer steps these"
        if plan.masters:
            why = "in a loop of one's own; half as many bytes (split) in a TrainStep that updates in one pass"
        made.add_row(*_sizes("fp32", len(low), count), "their fp32 masters", why)
    if plan.parameters:
        out.print(made)


def _sizes(name: str, tensors: int, count: int) -> tuple[str, str, str, str]:
    return name, str(tensors), f"{count:,}", f"{count * DTYPES[name].itemsize / MEGABYTE:,.3f}"
