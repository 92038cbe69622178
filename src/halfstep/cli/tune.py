"""``halfstep tune``: find the cheapest policy for a task on this machine, and write it with the reasons."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

import halfstep as hs
from halfstep.advise.tune import Progress, Tuning
from halfstep.cli.options import split
from halfstep.cli.progress import Watch
from halfstep.cli.terminal import INTERRUPTED, Files, command_line, console, record, say
from halfstep.tasks import TaskError, load_task
from halfstep.tasks.machine import device_type


def carry_out(
    task: str, output: Path, target: str, max_loss_rise: float | None, minutes: float, seeds: int, seed: int,
    dtypes: str, compile: bool, resume: bool, device: str, html: Path | None, json: Path | None,
) -> int:  # fmt: skip
    """Run the command; return its exit code."""
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

    command = command_line().replace(" --resume", "")

    def see(moment: Progress) -> None:
        watch.see(moment.share, moment.phase, moment.note)
        if moment.found is not None:
            output.write_text(replace(moment.found, command=command).to_toml(), encoding="utf-8")
            say(
                err, f"written after {moment.found.seconds:.0f} s: {output}, {moment.found.chosen.label}; more is tried"
            )

    try:
        with Watch(err) as watch:
            found = hs.tune(
                loaded, target=target, max_loss_rise=max_loss_rise, minutes=minutes, device=where, seed=seed,
                seeds=seeds, dtypes=split(dtypes), compile=compile, resume=state, on_progress=see,
            )  # fmt: skip
    except KeyboardInterrupt:
        say(err, "interrupted before anything was measured: nothing was written", style="red")
        return INTERRUPTED
    found = replace(found, command=command)
    output.write_text(found.to_toml(), encoding="utf-8")
    _print(out, found)
    say(out, f"written: {output}; what was measured: {state}")
    files.write(out, json=record(**found.record()), html=found.save_html)
    return INTERRUPTED if found.interrupted else 0


def _print(out: Console, found: Tuning) -> None:
    say(out)
    for line in str(found).splitlines():
        say(out, line, style="bold" if line.startswith("chosen") else "yellow" if line.startswith("note") else None)
