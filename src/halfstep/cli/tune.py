"""``halfstep tune``: find the cheapest policy for a task on this machine, and write it with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

import halfstep as hs
from halfstep.advise.tune import Tuning
from halfstep.cli.terminal import (
    INTERRUPTED, command_line, complain, console, device_type, say, writable, write_json,
)  # fmt: skip
from halfstep.cli.watch import Watch
from halfstep.report import require_extra
from halfstep.tasks import TaskError, load_task

__all__ = ["run_tune"]

def run_tune(
    *, task: str, output: Path, target: str, max_loss_rise: float | None, minutes: float, seeds: int, seed: int,
    dtypes: Sequence[str], compile: bool, resume: bool, device: str, html_path: Path | None, json_path: Path | None,
) -> int:  # fmt: skip
    """Run the command, whose options the arguments are.

    Returns:
        Its exit code: 0; 2 for bad input; 130 after Ctrl-C, when the best safe policy so far was written.
    """
    out, err = console(), console(stderr=True)
    state = output.with_name(output.name + ".state.json")
    try:
        where = device_type(device)
        _check_outputs(output, html_path, json_path)
        loaded = load_task(task)
        if resume and not state.exists():
            raise TaskError(f"--resume: there is no {str(state)!r} of an earlier search; leave --resume out")
        if state.exists() and not resume:
            state.replace(state.with_name(state.name + ".old"))
        with Watch(err) as watch:
            found = hs.tune(
                loaded, target=target, max_loss_rise=max_loss_rise, minutes=minutes, device=where, seed=seed,
                seeds=seeds, dtypes=dtypes, compile=compile, resume=state, on_progress=lambda moment: watch.see(moment.share, moment.phase, moment.note),
            )  # fmt: skip
    except hs.HalfstepError as error:
        return complain(error)
    except KeyboardInterrupt:
        say(err, "interrupted before anything was measured: nothing was written", style="red")
        return INTERRUPTED
    command = command_line(
        "tune", task, output=output, target=target, max_loss_rise=max_loss_rise, minutes=minutes, seeds=seeds,
        seed=seed, dtypes=",".join(dtypes), no_compile=not compile, device=device,
    )  # fmt: skip
    found = replace(found, command=command)
    output.write_text(found.to_toml(), encoding="utf-8")
    _print(out, found)
    say(out, f"written: {output}; what was measured: {state}")
    write_json(out, json_path, {"halfstep": hs.__version__, **found.record()})
    if html_path is not None:
        found.save_html(html_path)
        say(out, f"written: {html_path}")
    return INTERRUPTED if found.interrupted else 0


def _check_outputs(output: Path, html_path: Path | None, json_path: Path | None) -> None:
    """Check that all output can be written, before minutes of measuring."""
    if output.suffix != ".toml":
        raise TaskError(f"--output {str(output)!r}: a policy's file ends in .toml, so that Policy.of reads it")
    if html_path is not None:
        require_extra("--html")
    for path, option in ((output, "--output"), (html_path, "--html"), (json_path, "--json")):
        writable(path, option)


def _print(out: Console, found: Tuning) -> None:
    say(out)
    for line in str(found).splitlines():
        say(out, line, style="bold" if line.startswith("chosen") else "yellow" if line.startswith("note") else None)

