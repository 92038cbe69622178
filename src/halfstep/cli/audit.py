"""``halfstep audit``: what a policy does to every operator, weight and gradient of a task's model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

import halfstep as hs
from halfstep.cli.terminal import command_line, complain, console, device_type, item, say, table, writable, write_json
from halfstep.report import require_extra
from halfstep.tasks import Task, TaskError, load_task
from halfstep.tasks.candidates import policy_candidate

__all__ = ["policy_of", "run_audit"]

PLACES = 4
"""Places named of each group of findings."""

HIT = 0.01
"""Share of a row's numbers whose loss counts."""

COLOURS = {"overflow_risk": "yellow", "rounding": "yellow", "saturation": "yellow"}


def run_audit(
    *, task: str, policy: str, steps: int, after: int, rows: int, sort: str, module: str, role: str,
    what_if: Sequence[str], device: str, json_path: Path | None, html_path: Path | None,
) -> int:  # fmt: skip
    """Run the command, whose options the arguments are; return its exit code: 0, or 2 for bad input."""
    out = console()
    try:
        where = device_type(device)
        chosen = policy_of(policy, where)
        loaded = load_task(task)
        questions = [_question(text) for text in what_if]
        writable(json_path)
        if html_path is not None:
            require_extra("--html")
            writable(html_path, "--html")
        empty = hs.lens.Audit(rows=(), policy=chosen, plan=hs.resolve(chosen, loaded.model(), where), steps=0)
        _asked(empty, module, role, sort, questions)  # refuses bad options before anything runs
        audit = _audited(loaded, chosen, where, steps, after)
        shown, answers = _asked(audit, module, role, sort, questions)
    except hs.HalfstepError as error:
        return complain(error)
    _print_findings(out, audit)
    _print_rows(out, shown, rows)
    for text, answer in zip(what_if, answers, strict=True):
        _print_answer(out, text, answer, rows)
    command = command_line("audit", task, policy=policy, steps=steps, after=after, device=device)
    report: dict[str, Any] = {"command": command, "halfstep": hs.__version__, **audit.to_dict()}
    report["what_if"] = [
        {"question": text, "rows": [a.record() for a in answer]} for text, answer in zip(what_if, answers, strict=True)
    ]
    write_json(out, json_path, report)
    if html_path is not None:
        audit.save_html(html_path)
        say(out, f"written: {html_path}")
    return 0


def policy_of(label: str, device: str) -> hs.Policy:
    """Return the policy called `label`: a preset or a path, with :fp16 or another format behind it.

    Raises:
        TaskError: no such policy, or a loop of torch alone.
    """
    found = policy_candidate(label, device)
    if found is None or found.policy is None:
        raise TaskError(f"{label!r} is a training loop without halfstep; name a preset ('torch' has torch.amp's lists)")
    return found.policy


def _question(text: str) -> tuple[str, float | None]:
    """Return format and scale of ``fp16`` or ``fp16:1024``."""
    form, colon, scale = text.partition(":")
    try:
        return form, float(scale) if colon else None
    except ValueError:
        raise TaskError(f"--what-if {text!r}: {scale!r} is no loss scale; write fp16 or fp16:1024") from None


def _audited(task: Task, policy: hs.Policy, device: str, steps: int, after: int) -> hs.lens.Audit:
    """Train a new model of `task` for `after` steps under `policy`, and audit the steps that follow."""
    torch.manual_seed(0)
    model = task.model().to(device)
    optimizer = task.optimizer(model)

    scaler = None
    if after:
        train = hs.TrainStep(model, optimizer, task.loss_fn, policy=policy, clip_norm=task.clip_norm)
        for step in range(after):
            train(*task.batch_on(device, 0, step))
        train.flush()
        scaler = train.scaler
    batches = [task.batch_on(device, 0, after + step) for step in range(steps)]
    return hs.audit(
        model, batches, task.loss_fn, policy, optimizer, steps=steps, clip_norm=task.clip_norm, scaler=scaler
    )


def _asked(
    audit: hs.lens.Audit, module: str, role: str, sort: str, questions: Sequence[tuple[str, float | None]]
) -> tuple[hs.lens.Audit, list[tuple[Any, ...]]]:
    """Return the rows to print, and the answers to ``--what-if``."""
    shown = audit.filter(module=module, role=role)
    shown = shown.sorted(sort, descending=sort != "headroom") if sort else shown.worst(len(shown))
    return shown, [audit.what_if(form, scale) for form, scale in questions]


def _print_findings(out: Any, audit: hs.lens.Audit) -> None:
    say(out, audit.headline, style="bold")
    for note in audit.notes:
        item(out, note, style="yellow")
    groups = audit.groups()
    if not groups:
        say(out, audit.quiet, style="red" if audit.bad else "green")
    for finding, places in groups:
        more = f" and {len(places) - PLACES} more" if len(places) > PLACES else ""
        say(out)
        say(out, f"{finding.kind}: {', '.join(places[:PLACES])}{more}", style=COLOURS.get(finding.kind, "red"))
        if finding.line:
            say(out, f"  at {finding.line}")
        say(out, f"  {finding.cause}")
        say(out, f"  remedy: {finding.remedy}")
        for line in finding.diff.splitlines():
            say(out, f"    {line}")
    say(out)


def _print_rows(out: Any, audit: hs.lens.Audit, count: int) -> None:
    headers, *lines = audit.table()
    made = table(out, *headers, right=tuple(range(4, len(headers))))
    for line in lines[:count]:
        made.add_row(*map(Text, line))
    out.print(made)
    if len(lines) > count:
        say(out, f"{len(lines) - count} more rows; --rows {len(lines)} prints them all, --json and --html write them")


def _print_answer(out: Any, question: str, answers: Sequence[Any], count: int) -> None:
    """Print the rows that a format would hit hardest."""
    hit = [a for a in answers if a.underflow[1] >= HIT or a.overflow[1] > 0]
    hit.sort(key=lambda a: (a.overflow[1], a.underflow[1]), reverse=True)
    say(out)
    say(out, f"what if {question}: {len(hit)} of {len(answers)} rows would lose numbers", style="bold")
    if not hit:
        return
    made = table(out, "module", "operator", "role", "underflow", "overflow", "best scale", right=(3, 4, 5))
    for a in hit[:count]:
        name = f"{a.op} {a.parameter.rpartition('.')[2]}".strip()
        made.add_row(*map(Text, (a.module or "(root)", name, a.role, _bounds(a.underflow), _bounds(a.overflow))),
                     f"2**{round(math.log2(a.best_scale))}")  # fmt: skip
    out.print(made)


def _bounds(bounds: tuple[float, float]) -> str:
    low, high = (f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %" for share in bounds)
    return low if low == high else f"{low} to {high}"
