"""``halfstep compare``: load tasks and policies, check all of it, train, print, write JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import halfstep as hs
from halfstep.cli.tables import print_comparison
from halfstep.errors import did_you_mean
from halfstep.tasks import Task, TaskError, load_task, machine, task_names
from halfstep.tasks.candidates import Candidate, candidates, default_labels
from halfstep.tasks.compare import Comparison, check, compare, rounds_of
from halfstep.tasks.measure import ENOUGH_SEEDS

__all__ = ["run_compare"]

EXCERPT_SEEDS = 3
PLAIN_WIDTH = 200  # columns of a table that no terminal cuts
WRONG_USE = 2  # exit code for bad input


def run_compare(
    *,
    tasks: Sequence[str],
    labels: Sequence[str],
    steps: int | None,
    seeds: int | None,
    json_path: Path | None,
    excerpt: bool,
    device: str,
) -> int:
    """Run the command; return its exit code: 0, or 2 for bad input, after which nothing was trained.

    Args:
        tasks: names or ``file.py:function``; none: all that come with halfstep and can be loaded.
        labels: policies; none: the default list.
        steps: of each run; None: the task's.
        seeds: None: 5, or 3 in an excerpt.
        json_path: where to write the report, or None.
        excerpt: few steps and seeds.
        device: device type, "" for the accelerator, if any.
    """
    out, err = _console(), _console(stderr=True)
    try:
        where = _device(device)
        loaded = _load(tasks, err)
        compared = candidates(labels or default_labels(where), where)
        for task in loaded:
            check(task, compared, where)
        if json_path is not None:
            _writable(json_path)
    except (hs.HalfstepError, NotImplementedError) as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
        return WRONG_USE
    runs = seeds or (EXCERPT_SEEDS if excerpt else ENOUGH_SEEDS)
    about = machine()
    if excerpt:
        out.print(
            f"An excerpt: few steps, {runs} seeds. The full comparison is `halfstep compare` without --excerpt.",
            highlight=False,
        )
    _say_machine(out, about)
    comparisons = []
    for task in loaded:
        length = steps or (task.excerpt_steps if excerpt else task.steps)
        comparisons.append(_compare(task, compared, length, runs, where, err))
        print_comparison(out, comparisons[-1])
    if json_path is not None:
        command = _command(
            tasks=tasks,
            labels=labels,
            steps=steps,
            seeds=seeds,
            json_path=json_path,
            excerpt=excerpt,
            device=device,
        )
        report = _report(comparisons, about, command, excerpt=excerpt)
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        out.print(f"written: {json_path}", highlight=False, markup=False)
    return 0


def _console(*, stderr: bool = False) -> Console:
    """Return a console that cuts nothing where nobody is watching."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH, soft_wrap=True)


def _device(wanted: str) -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    there = ("cpu",) if accelerator is None else (accelerator.type, "cpu")
    if not wanted:
        return there[0]
    if wanted not in there:
        raise TaskError(f"device {wanted!r} is not here{did_you_mean(wanted, there)}; there is {' and '.join(there)}")
    return wanted


def _load(names: Sequence[str], err: Console) -> list[Task]:
    """Return the tasks called `names`; without names, every task whose data is installed, and say which is not."""
    if names:
        return [load_task(name) for name in dict.fromkeys(names)]
    loaded = []
    for name in task_names():
        try:
            loaded.append(load_task(name))
        except TaskError as error:
            err.print(f"left out: {error}", markup=False, highlight=False)
    return loaded


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise TaskError(f"--json {str(path)!r} cannot be written: {error.strerror}") from error


def _say_machine(out: Console, about: dict[str, Any]) -> None:
    on = f", {about['accelerator']}" if about["accelerator"] else ""
    line = f"{about['cpu']}, {about['cores']} cores{on}; torch {about['torch']}, Python {about['python']}"
    out.print(line, highlight=False, markup=False)


def _compare(
    task: Task, compared: tuple[Candidate, ...], steps: int, seeds: int, device: str, err: Console
) -> Comparison:
    total = rounds_of(compared, steps, seeds)
    if not err.is_terminal:
        err.print(f"{task.name}: {len(compared) + 1} runs of {steps} steps, {seeds} seeds ...", highlight=False)
        return compare(task, compared, steps=steps, seeds=seeds, device=device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        bar = progress.add_task(task.name, total=total)
        return compare(task, compared, steps=steps, seeds=seeds, device=device, on_step=lambda: progress.advance(bar))


def _command(
    *,
    tasks: Sequence[str],
    labels: Sequence[str],
    steps: int | None,
    seeds: int | None,
    json_path: Path | None,
    excerpt: bool,
    device: str,
) -> str:
    """Return the command line that asks for this comparison again."""
    options = {
        "--policies": ",".join(labels),
        "--steps": steps,
        "--seeds": seeds,
        "--device": device,
        "--json": json_path,
    }
    words = [word for task in tasks for word in ("--task", task)]
    words += [str(word) for option, value in options.items() if value for word in (option, value)]
    return shlex.join(["halfstep", "compare", *words, *(["--excerpt"] if excerpt else [])])


def _report(comparisons: Sequence[Comparison], about: dict[str, Any], command: str, *, excerpt: bool) -> dict[str, Any]:
    return {
        "command": command,
        "halfstep": hs.__version__,
        "excerpt": excerpt,
        "machine": about,
        "tasks": [_plain(dataclasses.asdict(c)) for c in comparisons],
    }


def _plain(value: Any) -> Any:
    """Return `value` with the floats JSON has no word for (nan, inf) as None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
