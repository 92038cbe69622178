"""``halfstep compare``: load tasks and policies, check all of it, train, print, write JSON and HTML."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from halfstep.cli.comparison import comparison_page, comparison_section
from halfstep.cli.options import split
from halfstep.cli.progress import Live
from halfstep.cli.terminal import Files, command_line, console, machine_line, print_section, record, say
from halfstep.report import write_page
from halfstep.tasks import Task, TaskError, load_task, machine, task_names
from halfstep.tasks.candidates import candidates, default_labels
from halfstep.tasks.compare import check, compare
from halfstep.tasks.machine import device_type
from halfstep.tasks.measure import ENOUGH_SEEDS


def carry_out(
    task: list[str] | None, policies: list[str] | None, steps: int | None, seeds: int | None, json: Path | None,
    html: Path | None, device: str,
) -> int:  # fmt: skip
    """Run the command; return its exit code."""
    out, err = console(), console(stderr=True)
    where = device_type(device)
    loaded, labels = _load(task or (), err), split(policies)
    compared = candidates(labels or default_labels(where), where)
    for each in loaded:
        check(each, compared, where)
    files = Files(json=json, html=html)
    runs, about = seeds or ENOUGH_SEEDS, machine()
    say(out, machine_line(about))
    comparisons = []
    for each in loaded:
        length = steps or each.steps
        with Live(err, each.name, runs=len(compared) + 1, steps=length, seeds=runs) as live:
            made = compare(each, compared, steps=length, seeds=runs, device=where, on_step=live.step)
        comparisons.append(made)
        print_section(out, comparison_section(made))
    day = datetime.date.today()
    files.write(
        out,
        json=record(machine=about, tasks=comparisons),
        html=lambda path: write_page(comparison_page(comparisons, about=about, command=command_line(), day=day), path),
    )
    return 0


def _load(names: Sequence[str], err: Console) -> list[Task]:
    """Return the tasks called `names`; without names, every task whose data is installed, and print which is not."""
    if names:
        return [load_task(name) for name in dict.fromkeys(names)]
    loaded = []
    for name in task_names():
        try:
            loaded.append(load_task(name))
        except TaskError as error:
            say(err, f"left out: {error}")
    return loaded
