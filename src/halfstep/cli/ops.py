"""``halfstep ops``: which rule each operator has under a policy and why; what differs between two; a model's plan."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import halfstep as hs
from halfstep.cli import completion
from halfstep.cli.optables import (
    RULES,
    Changed,
    Ruled,
    ordered,
    print_changes,
    print_fields,
    print_head,
    print_operators,
    print_parameters,
    print_ruled_modules,
)
from halfstep.cli.options import Device, Json, PolicyLabel
from halfstep.cli.terminal import Files, command, command_line, console, device_type, item, record, say
from halfstep.tasks import Task, TaskError
from halfstep.tasks.candidates import Candidate, policy_candidate
from halfstep.tasks.registry import load_model
from halfstep.tasks.used import Used, used_operators

__all__ = ["run_ops"]

OWN = "::"  # in the names of custom operators, as in torch.library's


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The options of the command line, checked."""

    candidate: Candidate
    policy: hs.Policy
    other: Candidate | None
    source: Task | nn.Module | None
    plan: hs.policy.Plan
    names: tuple[str, ...]


@command
def run_ops(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATTERN",
            help="Operators, such as softmax or 'conv*'. Default: all with a rule.",
            autocompletion=completion.operators,
        ),
    ] = None,
    policy: PolicyLabel = "mixed",
    diff: Annotated[
        str,
        typer.Option("--diff", help="Show what differs from this policy instead.", autocompletion=completion.policy),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="path/to/file.py:function, which returns an hs.Task or a torch.nn.Module: show its plan.",
        ),
    ] = "",
    device: Device = "",
    json: Json = None,
) -> int:
    """Show the rule of every operator under a policy: which part of the policy decides, why, and from which source."""
    out, where = console(), device or device_type("")
    asked = _check(policy, patterns or (), diff, model, where)
    files = Files(json=json)
    if asked.other is not None:
        shown = _show_difference(out, asked, asked.other, where)
    else:
        shown = _show_plan(out, asked, where, patterns or ())
    again = command_line("ops", *(patterns or ()), policy=policy, diff=diff, model=model, device=device, json=json)
    facts = {"device": where, "label": asked.candidate.label, "policy": asked.policy.to_toml()}
    files.write(out, json=record(again, **facts, **shown))
    return 0


def _check(policy: str, patterns: Sequence[str], diff: str, model: str, device: str) -> _Asked:
    """Check and load everything before anything is printed."""
    if diff and model:
        raise TaskError("--diff compares two policies and --model shows one; leave one of them out")
    if ":" in device:
        raise TaskError(f"--device {device!r}: rules are the same for every index; write {device.partition(':')[0]!r}")
    hs.policy.units(device)  # refuses what is no device type
    mine = _candidate(policy, device)
    other = _candidate(diff, device) if diff else None
    source = load_model(model) if model else None  # may register custom operators
    chosen = mine.policy or hs.Policy.of(policy)
    instance = source.model() if isinstance(source, Task) else source
    if instance is None:
        plan = hs.resolve(chosen.replace(modules=()), nn.Identity(), device)
    else:
        plan = hs.resolve(chosen, instance, device)
    names = _matching(patterns, plan)
    return _Asked(candidate=mine, policy=chosen, other=other, source=source, plan=plan, names=names)


def _candidate(label: str, device: str) -> Candidate:
    """Return the policy called `label`, with the format that ``halfstep compare`` would give it."""
    found = policy_candidate(label, device)
    if found is None:
        instead = "preset 'O0' keeps everything in fp32" if label.startswith("fp32") else "preset 'torch' has its lists"
        raise TaskError(f"{label!r} is a training loop without halfstep and has no policy; {instead}")
    name, colon, _ = label.rpartition(":")
    path = Path(name if colon and name.endswith(".toml") else label)
    if path.suffix != ".toml":
        return found
    return dataclasses.replace(found, label=f"{path.name} {found.dtype}")  # its own name may be its preset's


def _matching(patterns: Iterable[str], plan: hs.policy.Plan) -> tuple[str, ...]:
    """Return the operators that `patterns` stand for, each once."""
    names: list[str] = []
    for pattern in patterns:
        if OWN in pattern:
            own = [name for name, _ in plan.operators if OWN in name]
            found = tuple(name for name in own if fnmatchcase(name, pattern))
            if not found:
                raise TaskError(
                    f"no custom operator {pattern!r} is registered; registered are {', '.join(own) or 'none'}"
                )
        else:
            found = hs.policy.operator_names(pattern)
        names += found
    return tuple(dict.fromkeys(names))


def _show_plan(out: Any, asked: _Asked, device: str, patterns: Sequence[str]) -> dict[str, Any]:
    used, problem = _used(asked, device)
    rules = dict(asked.plan.operators)
    names = asked.names or tuple(used or rules)
    if used and patterns:
        names = tuple(name for name in asked.names if name in used)
    rows = ordered(_ruled(name, rules, used) for name in names)
    notes = [*asked.plan.notes, *_notes(asked)]
    print_head(out, asked.candidate.label, asked.plan, is_model=asked.source is not None)
    for note in notes:
        item(out, note, style="yellow")
    if asked.source is not None:
        print_ruled_modules(out, asked.plan)
        print_parameters(out, asked.plan)
    if problem:
        say(out)
        item(out, problem, style="yellow")
    total = len(hs.policy.operator_names("*"))
    print_operators(out, rows, asked.plan, total=total, used=used is not None, chosen=bool(patterns))
    shown: dict[str, Any] = {"notes": notes, "operators": [dataclasses.asdict(row) for row in rows]}
    if asked.source is not None:
        shown["modules"] = [dataclasses.asdict(module) for module in asked.plan.modules]
        shown["parameters"] = [dataclasses.asdict(parameter) for parameter in asked.plan.parameters]
    return shown


def _ruled(name: str, rules: dict[str, Any], used: dict[str, Used] | None) -> Ruled:
    decision = rules.get(name)
    calls = used.get(name) if used else None
    return Ruled(
        operator=name,
        rule=decision.rule if decision else "",
        decided_by=decision.origin if decision else "",
        reason=decision.reason if decision else "no rule: runs in its inputs' format",
        calls=calls.calls if calls else 0,
        gives=calls.gives if calls else (),
    )


def _used(asked: _Asked, device: str) -> tuple[dict[str, Used] | None, str]:
    """Return the operators that a task's first step calls, or None and why they are not known."""
    if asked.source is None:
        return None, ""
    if not isinstance(asked.source, Task):
        return None, "operators that the model calls are counted if the function returns an hs.Task, which has a batch"
    try:
        device_type(device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "policy .* on ")  # it is among the plan's notes
            return used_operators(asked.source, asked.policy, device), ""
    except Exception as error:  # of the user's model: its plan is worth showing all the same
        first = (str(error).splitlines() or [""])[0]
        return None, f"operators are not counted: the first step raised {type(error).__name__}: {first}"


def _notes(asked: _Asked) -> list[str]:
    """Return what to know of the policy besides its plan."""
    notes = []
    if asked.plan.policy.dtype == "fp32" and asked.plan.operators:
        notes.append("the low format is fp32, so no rule changes anything")
    if asked.policy.table == "torch":
        notes.append(
            "torch.autocast's lists as halfstep has them written down; a region uses those of the torch that runs it, "
            f"{torch.__version__} here"
        )
    if asked.policy.modules and asked.source is None:
        notes.append("the policy has rules for modules too, which win over those of operators; --model shows them")
    return notes


def _show_difference(out: Any, asked: _Asked, other: Candidate, device: str) -> dict[str, Any]:
    theirs = other.policy
    assert theirs is not None
    plan = hs.resolve(theirs.replace(modules=()), nn.Identity(), device)
    left, right = dict(asked.plan.operators), dict(plan.operators)
    changes = []
    for name in asked.names or sorted(left.keys() | right.keys()):
        before, after = _ruled(name, left, None), _ruled(name, right, None)
        if before.rule != after.rule:
            changes.append(Changed(before=before, after=after))
    changes.sort(key=lambda each: (RULES.index(each.before.rule), RULES.index(each.after.rule), each.before.operator))
    fields = [
        (field.name, getattr(asked.policy, field.name), getattr(theirs, field.name))
        for field in dataclasses.fields(hs.Policy)
        if field.name != "name" and getattr(asked.policy, field.name) != getattr(theirs, field.name)
    ]
    labels = (asked.candidate.label, other.label)
    print_fields(out, labels, fields)
    print_changes(out, labels, changes, device)
    return {
        "other": {"label": other.label, "policy": theirs.to_toml()},
        "fields": [name for name, _, _ in fields],
        "operators": [dataclasses.asdict(change) for change in changes],
    }
