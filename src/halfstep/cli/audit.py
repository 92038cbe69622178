"""``halfstep audit``: what a policy does to every operator, weight and gradient of a task's model."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import halfstep as hs
from halfstep.cli.terminal import STYLES, Files, console, record, say, show
from halfstep.report import table
from halfstep.tasks import Task, TaskError, load_task
from halfstep.tasks.candidates import policy_named
from halfstep.tasks.machine import device_type

HIT = 0.01
"""Share of a row's numbers whose loss counts."""


def carry_out(
    task: str, policy: str, steps: int, after: int, rows: int, sort: str, module: str, role: str,
    what_if: list[str] | None, device: str, json: Path | None, html: Path | None,
) -> int:  # fmt: skip
    """Run the command; return its exit code."""
    out, where = console(), device_type(device)
    chosen, loaded = policy_named(policy, where), load_task(task)
    questions = {text: _question(text) for text in what_if or ()}
    files = Files(json=json, html=html)
    empty = hs.lens.Audit(rows=(), policy=chosen, plan=hs.resolve(chosen, loaded.model(), where), steps=0)
    _asked(empty, module, role, sort, questions)
    audit = _audited(loaded, chosen, where, steps, after)
    shown, answers = _asked(audit, module, role, sort, questions)
    for line, style in audit.lines():
        say(out, line, STYLES.get(style))
    say(out)
    headers, *lines = shown.table()
    show(out, table("", headers, lines[:rows], words=(1, 2, 3)))
    if len(lines) > rows:
        say(out, f"{len(lines) - rows} more rows; --rows {len(lines)} prints them all, --json and --html write them")
    for text, answer in answers.items():
        _print_answer(out, text, answer, rows)
    asked = [{"question": text, "rows": [a.record() for a in answer]} for text, answer in answers.items()]
    files.write(out, json=record(**audit.to_dict(), what_if=asked), html=audit.save_html)
    return 0


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
    audit: hs.lens.Audit, module: str, role: str, sort: str, questions: Mapping[str, tuple[str, float | None]]
) -> tuple[hs.lens.Audit, dict[str, tuple[Any, ...]]]:
    """Return the rows to print, and the answers to ``--what-if``."""
    shown = audit.filter(module=module, role=role)
    shown = shown.sorted(sort, descending=sort != "headroom") if sort else shown.worst(len(shown))
    return shown, {text: audit.what_if(form, scale) for text, (form, scale) in questions.items()}


def _print_answer(out: Console, question: str, answers: Sequence[Any], count: int) -> None:
    hit = [a for a in answers if a.underflow[1] >= HIT or a.overflow[1] > 0]
    hit.sort(key=lambda a: (a.overflow[1], a.underflow[1]), reverse=True)
    say(out)
    say(out, f"what if {question}: {len(hit)} of {len(answers)} rows would lose numbers", style="bold")
    headers = ("module", "operator", "role", "underflow", "overflow", "best scale")
    rows = (
        (a.module or "(root)", f"{a.op} {a.parameter.rpartition('.')[2]}".strip(), a.role, _bounds(a.underflow),
         _bounds(a.overflow), f"2**{round(math.log2(a.best_scale))}")
        for a in hit[:count]
    )  # fmt: skip
    if hit:
        show(out, table("", headers, rows, words=(1, 2)))


def _bounds(bounds: tuple[float, float]) -> str:
    low, high = (f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %" for share in bounds)
    return low if low == high else f"{low} to {high}"
