"""Tables of a policy: operators and their rules, what differs between two policies, a model's modules and parameters.

On a terminal operators that share rule and reason share a row; elsewhere each has its own, so that lines can be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console

import halfstep as hs
from halfstep.cli.terminal import STYLES, say, show
from halfstep.formats import DTYPES
from halfstep.report import Cell, counted, table

__all__ = [
    "Changed", "RULES", "Ruled", "ordered", "print_changes", "print_fields", "print_head", "print_operators",
    "print_parameters", "print_ruled_modules",
]  # fmt: skip

RULES = (*hs.policy.RULE_KINDS, "")
RULE_STYLES = {rule: STYLES[rule or "none"] for rule in RULES}
NO_RULE = "in the format its arguments come in"
MEGABYTE = 1e6
FEW = 3  # names shown of many

Key = TypeVar("Key", bound=Hashable)
Member = TypeVar("Member")


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
            means = hs.policy.RULE_KINDS[rule].means if rule else NO_RULE
            say(out, f"{rule or 'no rule'}: {means.format(low=plan.policy.dtype)}", style=RULE_STYLES[rule])
    lines = ((row.operator, _rule(row.rule), _by(row.decided_by, plan), row.reason) for row in rows)
    _show(out, ("operator", "rule", "decided by", "why (source)"), lines, shared=True)


def _print_used(out: Console, rows: Sequence[Ruled], plan: hs.policy.Plan) -> None:
    say(out, "Operators that forward pass and loss call, with the first batch", style="bold")
    lines = []
    for row in rows:
        gives = [(plan.policy.dtype if name == "low" else name, times) for name, times in row.gives]
        words = gives[0][0] if len(gives) == 1 else ", ".join(f"{name} {times}" for name, times in gives)
        by = _by(row.decided_by, plan)
        lines.append((row.operator, str(row.calls), _rule(row.rule), words, by, row.reason))
    _show(out, ("operator", "calls", "rule", "gives", "decided by", "why (source)"), lines, numbers=(1,))


def _show(
    out: Console, headers: Sequence[str], rows: Iterable[tuple[str | Cell, ...]], *, numbers: Collection[int] = (),
    shared: bool = False,
) -> None:  # fmt: skip
    """Print a table of words, with numbers in some columns.

    Args:
        out: where to print.
        headers: names of the columns.
        rows: what stands in them.
        numbers: columns that are flush right.
        shared: on a terminal rows that differ in their first cells alone share a row.
    """
    ends: Collection[int] = ()
    if shared and out.is_terminal:
        groups = _grouped((row[1:], str(row[0])) for row in rows)
        rows = [(", ".join(names), *rest) for rest, names in groups.items()]
        ends = range(len(groups))
    words = (place for place in range(len(headers)) if place not in numbers)
    show(out, table("", headers, rows, words), ends=ends)


def _grouped(pairs: Iterable[tuple[Key, Member]]) -> dict[Key, list[Member]]:
    """Return key -> what has it, in their order."""
    groups: dict[Key, list[Member]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return groups


def _rule(rule: str) -> Cell:
    return Cell(rule or "-", rule or "none")


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
    _show(out, ("field", *labels), ((name, _value(left), _value(right)) for name, left, right in fields))


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
    names, lines = ["operator", *labels], list[tuple[str | Cell, ...]]()
    names += [] if out.is_terminal else [f"why in {label}" for label in labels]  # reasons would leave no shared row
    for one in changes:
        both = (one.before, one.after)
        rules, reasons = [_rule(each.rule) for each in both], [each.reason for each in both]
        lines.append((one.before.operator, *rules, *(() if out.is_terminal else reasons)))
    _show(out, names, lines, shared=True)


def print_ruled_modules(out: Console, plan: hs.policy.Plan) -> None:
    """Print the modules that have a rule; on a terminal those that share one share a row."""
    ruled = [module for module in plan.modules if module.rule]
    say(out)
    if not ruled:
        say(out, f"Modules: none of {len(plan.modules)} has a rule of its own; operators follow theirs", style="bold")
        return
    say(out, f"Modules: {len(ruled)} of {len(plan.modules)} have a rule, which wins over those of operators", "bold")
    groups = _grouped(
        ((module.rule, module.format, module.reason), f"{module.path or '(root)'} ({module.kind})") for module in ruled
    )
    rows = (
        (_rule(rule), made_in, shown, reason)
        for (rule, made_in, reason), names in groups.items()
        for shown in ([_few(names)] if out.is_terminal else names)
    )
    _show(out, ("rule", "computes in", "modules", "why"), rows)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (f", ... ({len(names)})" if len(names) > FEW else "")


def print_parameters(out: Console, plan: hs.policy.Plan) -> None:
    """Print parameters by format and reason, with their bytes and those of fp32 masters."""
    say(out)
    total = sum(each.numel for each in plan.parameters)
    say(out, f"Parameters: {total:,} in {len(plan.parameters)} tensors", style="bold")
    groups = _grouped(((each.format, each.reason), each) for each in plan.parameters)
    rows = [
        (*_sizes(name, members), _few([each.name for each in members]), reason)
        for (name, reason), members in groups.items()
    ]
    low = [each for each in plan.parameters if each.low]
    if low and plan.policy.master == "master":
        why = "master='master': the optimizer steps these"
        if plan.masters:
            why = "in a loop of one's own; half as many bytes (split) in a TrainStep that updates in one pass"
        rows.append((*_sizes("fp32", low), "their fp32 masters", why))
    if rows:
        _show(out, ("format", "tensors", "elements", "MB", "parameters", "why"), rows, numbers=(1, 2, 3))


def _sizes(name: str, members: Sequence[Any]) -> tuple[str, str, str, str]:
    count = sum(each.numel for each in members)
    return name, str(len(members)), f"{count:,}", f"{count * DTYPES[name].itemsize / MEGABYTE:,.3f}"
