"""``halfstep ops``: which rule each operator has under a policy and why; what differs between two; a model's plan.

On a terminal operators that share rule and reason share a row; elsewhere each has its own, so that lines can be found.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

import halfstep as hs
from halfstep.cli.terminal import STYLES, Files, console, item, record, say, show
from halfstep.report import Cell, counted, table
from halfstep.tasks import Task, TaskError
from halfstep.tasks.candidates import policy_named, split_label
from halfstep.tasks.machine import device_type, generators_kept
from halfstep.tasks.task import load_model

OWN = "::"  # in the names of custom operators, as in torch.library's
RULES = (*(rule for rule, kind in hs.policy.RULE_KINDS.items() if kind.of_operators), "")
RULE_STYLES = {rule: STYLES[rule or "none"] for rule in RULES}
MEGABYTE = 1e6
FEW = 3  # names shown of many

Row = tuple[str | Cell, ...]

Used = Mapping[str, Counter[str]]
"""Operators that a model calls: name -> format of the result -> how often."""


class Decided(NamedTuple):
    """What is decided for one operator."""

    rule: str = ""  # "" for none
    decided_by: str = ""  # the part of the policy that decided, "" for none
    reason: str = "no rule: runs in its inputs' format"  # why, with its source


NO_RULE = Decided()


def carry_out(patterns: list[str] | None, policy: str, diff: str, model: str, device: str, json: Path | None) -> int:
    """Run the command; return its exit code."""
    out, where = console(), device or device_type("")
    if diff and model:
        raise TaskError("--diff compares two policies and --model shows one; leave one of them out")
    if ":" in where:
        raise TaskError(f"--device {where!r}: rules are the same for every index; write {where.partition(':')[0]!r}")
    hs.policy.units(where)  # refuses what is no device type
    mine = policy_named(policy, where)
    other = policy_named(diff, where) if diff else None
    source = load_model(model) if model else None  # may register custom operators
    plan = _plan(mine, source, where)
    names = _matching(patterns or (), plan)
    files, title = Files(json=json), _title(policy, mine)
    if other is not None:
        shown = _show_difference(out, (title, _title(diff, other)), mine, other, where, names)
    else:
        shown = _show_plan(out, title, mine, plan, source, names)
    files.write(out, json=record(device=where, label=title, policy=mine.to_toml(), **shown))
    return 0


def _plan(policy: hs.Policy, source: Task | nn.Module | None, device: str) -> hs.policy.Plan:
    if source is None:
        return hs.resolve(policy.replace(modules=()), nn.Identity(), device)
    return hs.resolve(policy, source.model() if isinstance(source, Task) else source, device)


def _title(label: str, policy: hs.Policy) -> str:
    """Return what a policy is called here: a file by its own name, as the name in it may be its preset's."""
    name = Path(split_label(label)[0]).name
    return name if policy.dtype == "fp32" else f"{name} {policy.dtype}"


def _matching(patterns: Iterable[str], plan: hs.policy.Plan) -> tuple[str, ...]:
    """Return the operators that `patterns` stand for, each once."""
    names: list[str] = []
    own = [name for name, _ in plan.operators if OWN in name]
    for pattern in patterns:
        found = [name for name in own if fnmatchcase(name, pattern)]
        if OWN in pattern and not found:
            raise TaskError(f"no custom operator {pattern!r} is registered; registered are {', '.join(own) or 'none'}")
        names += found if OWN in pattern else hs.policy.operator_names(pattern)
    return tuple(dict.fromkeys(names))


def _ruled(plan: hs.policy.Plan) -> dict[str, Decided]:
    return {name: Decided(found.rule, found.origin, found.reason) for name, found in plan.operators}


def _record(operator: str, decided: Decided, used: Used | None = None) -> dict[str, Any]:
    """Return what the JSON file has of an operator; no calls if they are not counted."""
    gives = (used or {}).get(operator, Counter[str]())
    return {"operator": operator, **decided._asdict(), "calls": gives.total(), "gives": gives.most_common()}


# ------------------------------------------------------------------ one policy


def _show_plan(
    out: Console, title: str, policy: hs.Policy, plan: hs.policy.Plan, source: Task | nn.Module | None,
    names: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Print a policy, or a model's plan under it; return what the JSON file has of it."""
    used, problem = _used(source, policy, plan.device)
    ruled = _ruled(plan)
    shown = [name for name in names or used or ruled if not used or name in used]
    rows = [(name, ruled.get(name, NO_RULE)) for name in shown]
    sizes = Counter(decided for _, decided in rows)  # reasons that many operators share come first
    rows.sort(key=lambda row: (RULES.index(row[1].rule), -sizes[row[1]], row[1].reason, row[0]))
    notes = [*plan.notes, *_notes(policy, plan, source)]
    facts: dict[str, Any] = {"notes": notes, "operators": [_record(*row, used) for row in rows]}
    _print_head(out, title if source is None else f"{plan.model} under {title}", plan)
    for note in notes:
        item(out, note, style="yellow")
    if source is not None:
        _print_modules(out, plan)
        _print_parameters(out, plan)
        facts |= {"modules": plan.modules, "parameters": plan.parameters}
    if problem:
        say(out)
        item(out, problem, style="yellow")
    say(out)
    _print_operators(out, rows, plan, chosen=bool(names), used=used)
    return facts


def _used(source: Task | nn.Module | None, policy: hs.Policy, device: str) -> tuple[Used | None, str]:
    """Return the operators that a task's first step calls, or None and why they are not known."""
    if source is None:
        return None, ""
    if not isinstance(source, Task):
        return None, "operators that the model calls are counted if the function returns an hs.Task, which has a batch"
    try:
        device_type(device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "policy .* on ")  # it is among the plan's notes
            return used_operators(source, policy, device), ""
    except Exception as error:  # of the user's model: its plan is worth showing all the same
        first = (str(error).splitlines() or [""])[0]
        return None, f"operators are not counted: the first step raised {type(error).__name__}: {first}"


def _notes(policy: hs.Policy, plan: hs.policy.Plan, source: Task | nn.Module | None) -> list[str]:
    """Return what to know of the policy besides its plan."""
    notes = []
    if plan.policy.dtype == "fp32" and plan.operators:
        notes.append("the low format is fp32, so no rule changes anything")
    if policy.table == "torch":
        notes.append(
            "torch.autocast's lists as halfstep has them written down; a region uses those of the torch that runs it, "
            f"{torch.__version__} here"
        )
    if policy.modules and source is None:
        notes.append("the policy has rules for modules too, which win over those of operators; --model shows them")
    return notes


def _print_head(out: Console, subject: str, plan: hs.policy.Plan) -> None:
    policy, scale = plan.policy, plan.policy.scale
    masters = "fp32 masters" if policy.master == "master" else f"master={policy.master}"
    if plan.masters:
        masters = f"master auto ({plan.masters})"
    facts = [f"low format {policy.dtype}" if policy.dtype != "fp32" else "nothing is lowered"]
    facts.append(f"parameters low with {masters}" if policy.params == "low" else f"parameters {policy.params}")
    facts.append(f"residual stream {policy.residual}")
    facts.append(f"loss scale {f'dynamic from {scale.init:g}' if isinstance(scale, hs.ScaleRule) else scale}")
    facts += ["fp16 emulated"] if policy.emulate == "always" and policy.dtype == "fp16" else []
    say(out, f"{subject} on {plan.device}", style="bold")
    say(out, ", ".join(facts))


def _print_operators(
    out: Console, rows: Sequence[tuple[str, Decided]], plan: hs.policy.Plan, *, chosen: bool, used: Used | None
) -> None:
    """Print operators that a policy has rules for, or that a model has called."""
    table, low = plan.policy.table, plan.policy.dtype
    if not rows:
        none = f"no operator has a rule (table {table!r}): each runs in the format its arguments come in"
        say(out, none if used is None else "the model calls none of these operators")
        return
    by = {"table": f"table {table}", "": "-", "operator": "@hs.operator"}
    lines: list[Row] = []
    for name, decided in rows:
        why = (by.get(decided.decided_by, f"field {decided.decided_by}"), decided.reason)
        if used is None:
            lines.append((name, _rule(decided.rule), *why))
            continue
        calls = used.get(name, Counter[str]())
        gives = [(low if form == "low" else form, times) for form, times in calls.most_common()]
        words = gives[0][0] if len(gives) == 1 else ", ".join(f"{form} {times}" for form, times in gives)
        lines.append((name, str(calls.total()), _rule(decided.rule), words, *why))
    if used is not None:
        say(out, "Operators that forward pass and loss call, with the first batch", style="bold")
        _show(out, ("operator", "calls", "rule", "gives", "decided by", "why (source)"), lines, numbers=(1,))
        return
    if not chosen:
        total = len(hs.policy.operator_names("*"))
        say(out, f"{len(rows)} of {total} operators have a rule, the others run in the format their arguments come in")
    for rule in dict.fromkeys(decided.rule for _, decided in rows):
        means = hs.policy.RULE_KINDS[rule].means if rule else "in the format its arguments come in"
        say(out, f"{rule or 'no rule'}: {means.format(low=low)}", style=RULE_STYLES[rule])
    _show(out, ("operator", "rule", "decided by", "why (source)"), lines, shared=True)


def _print_modules(out: Console, plan: hs.policy.Plan) -> None:
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


def _print_parameters(out: Console, plan: hs.policy.Plan) -> None:
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
    return name, str(len(members)), f"{count:,}", f"{count * hs.formats.DTYPES[name].itemsize / MEGABYTE:,.3f}"


# ------------------------------------------------------------------ the operators that a task calls


class _OperatorCounter(hs.lens.Sink):
    """Counts operators while it is `on`, as the rules of a region call them: cast, and with composites taken apart."""

    def __init__(self) -> None:
        self.on = False
        self.results: dict[str, Counter[str]] = {}

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function and count it, if it is an operator, under the format of its result."""
        result = func(*args, **kwargs)
        name = hs.policy.operator_name(func) if self.on else None
        if name is not None:
            self.results.setdefault(name, Counter())[_format(result)] += 1
        return result


def _format(result: Any) -> str:
    for first in hs.trees.tensors(result):
        low = first.dtype in hs.formats.LOW_DTYPES
        return "low" if low else hs.formats.DTYPE_NAMES.get(first.dtype, str(first.dtype).removeprefix("torch."))
    return "none"


def used_operators(task: Task, policy: hs.Policy, device: str) -> dict[str, Counter[str]]:
    """Train a new model of `task` for one step under `policy`; count what it calls forward, by format."""
    if policy.dtype == "fp16":  # the rules are the same in bf16, and emulation would show its own operators
        policy = hs.Policy.of(policy, dtype="bf16")
    counter = _OperatorCounter()

    def loss_fn(model: nn.Module, *batch: Any) -> Any:
        counter.on = True
        try:
            return task.loss_fn(model, *batch)
        finally:
            counter.on = False

    with generators_kept():
        torch.manual_seed(0)
        model, batch = task.model().to(device), task.batch_on(device, 0, 0)
        step = hs.TrainStep(model, task.optimizer(model), loss_fn, policy=hs.Policy.of(policy, emulate="never"))
        with hs.lens.Tracer(counter, above=False):
            step(*batch)
    return counter.results


# ------------------------------------------------------------------ two policies


def _show_difference(
    out: Console, titles: tuple[str, str], mine: hs.Policy, other: hs.Policy, device: str, names: Sequence[str]
) -> dict[str, Any]:
    """Print fields and operators in which two policies differ; return what the JSON file has of it."""
    own = [(field.name, getattr(mine, field.name), getattr(other, field.name)) for field in fields(hs.Policy)]
    differ = [(name, left, right) for name, left, right in own if name != "name" and left != right]
    if differ:
        say(out, f"Fields in which {titles[0]} and {titles[1]} differ", style="bold")
        _show(out, ("field", *titles), ((name, _value(left), _value(right)) for name, left, right in differ))
    else:
        say(out, f"{titles[0]} and {titles[1]}: all fields are the same")
    left, right = (_ruled(_plan(policy, None, device)) for policy in (mine, other))
    every = ((name, left.get(name, NO_RULE), right.get(name, NO_RULE)) for name in names or {**left, **right})
    changes = [(name, before, after) for name, before, after in every if before.rule != after.rule]
    changes.sort(key=lambda change: (RULES.index(change[1].rule), RULES.index(change[2].rule), change[0]))
    if changes:
        say(out)
        count = counted(len(changes), "operator")
        say(out, f"{count} with another rule on {device}; -: no rule, in the format the arguments come in", "bold")
        rows: list[Row] = [(name, _rule(before.rule), _rule(after.rule)) for name, before, after in changes]
        why: list[str] = []
        if not out.is_terminal:  # where reasons would leave no shared row
            why = [f"why in {title}" for title in titles]
            rows = [(*row, change[1].reason, change[2].reason) for row, change in zip(rows, changes, strict=True)]
        _show(out, ("operator", *titles, *why), rows, shared=True)
    else:
        say(out, f"operators on {device}: no rule differs")
    return {
        "other": {"label": titles[1], "policy": other.to_toml()},
        "fields": [name for name, _, _ in differ],
        "operators": [{"before": _record(name, one), "after": _record(name, two)} for name, one, two in changes],
    }


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{pattern} = {rule}" for pattern, rule in value) or "-"
    return str(value)


# ------------------------------------------------------------------ tables


def _show(
    out: Console, headers: Sequence[str], rows: Iterable[Row], *, numbers: Collection[int] = (), shared: bool = False
) -> None:
    """Print a table; with `shared`, rows that differ in their first cells alone share a row on a terminal."""
    ends: Collection[int] = ()
    if shared and out.is_terminal:
        groups = _grouped((row[1:], str(row[0])) for row in rows)
        rows = [(", ".join(names), *rest) for rest, names in groups.items()]
        ends = range(len(groups))
    words = (place for place in range(len(headers)) if place not in numbers)
    show(out, table("", headers, rows, words), ends=ends)


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return groups


def _rule(rule: str) -> Cell:
    return Cell(rule or "-", rule or "none")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (f", ... ({len(names)})" if len(names) > FEW else "")
