"""``halfstep tune``: find the cheapest policy for a task on this machine, and write it with the reasons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import halfstep as hs
from halfstep.advise.tune import Tuning
from halfstep.cli.options import Device, Html, Json, TaskName, split
from halfstep.cli.progress import Watch
from halfstep.cli.terminal import INTERRUPTED, Files, command_line, console, record, say
from halfstep.tasks import TaskError, load_task
from halfstep.tasks.machine import device_type


def run_tune(
    task: TaskName,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the policy to this file (.toml).")],
    target: Annotated[str, typer.Option(help="time, memory, or the weights of both, such as 0.7:0.3.")] = "time",
    max_loss_rise: Annotated[
        float | None,
        typer.Option(
            help="How much higher than fp32's the loss may end, as a fraction (0.01: one per cent). Default: the "
            "spread of fp32 from seed to seed.",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for measuring.")] = 10.0,
    seeds: Annotated[
        int, typer.Option(min=0, help="Pairs of trainings of the test at the end, at least. Default: what it takes.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and orders.")] = 0,
    dtypes: Annotated[
        str,
        typer.Option(help="Low formats to try: bf16, fp16, or both with a comma. Default: the device's."),
    ] = "",
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Whether compiled steps are tried.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what an earlier search for this file measured.")
    ] = False,
    device: Device = "",
    html: Html = None,
    json: Json = None,
) -> int:
    """Find the cheapest policy for a task on this machine, and test whether it trains as fp32 does.

    Measures presets, exceptions, weight strategies and compiled steps beside fp32; writes the policy with its reasons.
    Ctrl-C writes the best safe policy so far; --resume goes on from there.
    """
    out, err = console(), console(stderr=True)
    state = output.with_name(output.name + ".state.json")
    where = device_type(device)
    if output.suffix != ".toml":
        raise TaskError(f"--output {str(output)!r}: a policy's file ends in .toml, so that Policy.of reads it")
    files = Files(output=output, html=html, json=json)
    loaded = load_task(task)
    if resume and not state.exists():
        raise TaskError(f"--resume: there is no {str(state)!r} of an earlier search; leave --resume out")
    if state.exists() and not resume:
        state.replace(state.with_name(state.name + ".old"))
    try:
        with Watch(err) as watch:
            found = hs.tune(
                loaded, target=target, max_loss_rise=max_loss_rise, minutes=minutes, device=where, seed=seed,
                seeds=seeds, dtypes=split(dtypes), compile=compile, resume=state,
                on_progress=lambda moment: watch.see(moment.share, moment.phase, moment.note),
            )  # fmt: skip
    except KeyboardInterrupt:
        say(err, "interrupted before anything was measured: nothing was written", style="red")
        return INTERRUPTED
    again = command_line(
        "tune", task, output=output, target=target, max_loss_rise=max_loss_rise, minutes=minutes, seeds=seeds,
        seed=seed, dtypes=",".join(split(dtypes)), no_compile=not compile, device=device,
    )  # fmt: skip
    found = replace(found, command=again)
    output.write_text(found.to_toml(), encoding="utf-8")
    _print(out, found)
    say(out, f"written: {output}; what was measured: {state}")
    files.write(out, json=record(**found.record()), html=found.save_html)
    return INTERRUPTED if found.interrupted else 0


def _print(out: Console, found: Tuning) -> None:
    say(out)
    for line in str(found).splitlines():
        say(out, line, style="bold" if line.startswith("chosen") else "yellow" if line.startswith("note") else None)
