"""``halfstep compare``: load tasks and policies, check all of it, train, print, write JSON and HTML."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from halfstep.cli import options
from halfstep.cli.options import TASK, Device, Html, Json, split
from halfstep.cli.pages.comparison import comparison_page, comparison_section
from halfstep.cli.progress import Live
from halfstep.cli.terminal import (
    Files,
    command_line,
    console,
    machine_line,
    print_section,
    record,
    say,
)
from halfstep.report import write_page
from halfstep.tasks import Task, TaskError, load_task, machine, task_names
from halfstep.tasks.candidates import candidates, default_labels
from halfstep.tasks.compare import check, compare
from halfstep.tasks.machine import device_type
from halfstep.tasks.measure import ENOUGH_SEEDS


def run_compare(
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"{TASK} Again for more. Default: all three.", autocompletion=options.task),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            help="Presets, torch.amp or policy files (.toml), each with :bf16 or :fp16 for another format; with commas "
            "between them, or the option again. fp32 and torch.amp always run.",
            autocompletion=options.policies,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the task's.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each policy. Default: 5, the fewest for a verdict.")
    ] = None,
    json: Json = None,
    html: Html = None,
    device: Device = "",
) -> int:
    """Train each policy from the same weights on the same batches, in turns, beside fp32 and torch.amp at its best.

    Prints what each did to the result, to the time of a step and to memory.
    """
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
    chosen = [word for name in task or () for word in ("--task", name)]
    again = command_line(
        "compare", *chosen, policies=",".join(labels), steps=steps, seeds=seeds, device=device, json=json,
        html=html,
    )  # fmt: skip
    day = datetime.date.today()
    files.write(
        out,
        json=record(again, machine=about, tasks=[dataclasses.asdict(c) for c in comparisons]),
        html=lambda path: write_page(comparison_page(comparisons, about=about, command=again, day=day), path),
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
