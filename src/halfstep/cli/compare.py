"""``halfstep compare``: load tasks and policies, check all of it, train, print, write JSON and HTML."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import halfstep as hs
from halfstep.cli.live import Live
from halfstep.cli.page import comparison_page
from halfstep.cli.tables import print_comparison
from halfstep.cli.terminal import command_line, complain, console, device_type, say, writable, write_json
from halfstep.report import render, require_extra
from halfstep.tasks import Task, TaskError, load_task, machine, task_names
from halfstep.tasks.candidates import candidates, default_labels
from halfstep.tasks.compare import Comparison, check, compare
from halfstep.tasks.measure import ENOUGH_SEEDS

__all__ = ["run_compare"]


def run_compare(
    *, tasks: Sequence[str], labels: Sequence[str], steps: int | None, seeds: int | None, json_path: Path | None,
    html_path: Path | None, device: str,
) -> int:  # fmt: skip
    """Run the command, whose options the arguments are.

    Returns:
        Its exit code: 0, or 2 for bad input, after which nothing was trained.
    """
    out, err = console(), console(stderr=True)
    try:
        where = device_type(device)
        loaded = _load(tasks, err)
        compared = candidates(labels or default_labels(where), where)
        for task in loaded:
            check(task, compared, where)
        _check_outputs(json_path, html_path)
    except hs.HalfstepError as error:
        return complain(error)
    runs = seeds or ENOUGH_SEEDS
    about = machine()
    on = f", {about['accelerator']}" if about["accelerator"] else ""
    say(out, f"{about['cpu']}, {about['cores']} cores{on}; torch {about['torch']}, Python {about['python']}")
    comparisons = []
    for task in loaded:
        length = steps or task.steps
        with Live(err, task.name, runs=len(compared) + 1, steps=length, seeds=runs) as live:
            made = compare(task, compared, steps=length, seeds=runs, device=where, on_step=live.see)
        comparisons.append(made)
        print_comparison(out, comparisons[-1])
    chosen = [word for task in tasks for word in ("--task", task)]
    command = command_line(
        "compare", *chosen, policies=",".join(labels), steps=steps, seeds=seeds, device=device, json=json_path,
        html=html_path,
    )  # fmt: skip
    write_json(out, json_path, _report(comparisons, about, command))
    if html_path is not None:
        today = datetime.date.today()
        page = comparison_page(comparisons, about=about, command=command, day=today)
        html_path.write_text(render(page), encoding="utf-8")
        say(out, f"written: {html_path}")
    return 0


def _check_outputs(json_path: Path | None, html_path: Path | None) -> None:
    """Check that all output can be written, before hours of training."""
    if html_path is not None:
        require_extra("--html")
        if json_path is not None and json_path.resolve() == html_path.resolve():
            raise TaskError(f"--json and --html name the same file {str(html_path)!r}; give them two")
    writable(json_path, "--json")
    writable(html_path, "--html")


def _load(names: Sequence[str], err: Console) -> list[Task]:
    """Return the tasks called `names`; without names, every task whose data is installed, and print which is not."""
    if names:
        return [load_task(name) for name in dict.fromkeys(names)]
    loaded = []
    for name in task_names():
        try:
            loaded.append(load_task(name))
        except TaskError as error:
            err.print(f"left out: {error}", markup=False, highlight=False)
    return loaded


def _report(comparisons: Sequence[Comparison], about: dict[str, Any], command: str) -> dict[str, Any]:
    return {
        "command": command,
        "halfstep": hs.__version__,
        "machine": about,
        "tasks": [dataclasses.asdict(c) for c in comparisons],
    }
