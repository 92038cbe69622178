"""Tables of the demo on a terminal: a part's numbers as soon as it has finished."""

from __future__ import annotations

import math

from rich.console import Console

from halfstep.cli.conclusions import interval
from halfstep.cli.numbers import Size
from halfstep.cli.tables import result_table, setting
from halfstep.cli.terminal import say, table
from halfstep.tasks.compare import Comparison
from halfstep.tasks.overflow import Rescue
from halfstep.tasks.pace import Pace
from halfstep.tasks.workloads import Workload
from halfstep.timing import Ratio

__all__ = ["print_accuracy", "print_pace", "print_rescue"]


def print_pace(out: Console, workload: Workload, made: Pace) -> None:
    """Print time and bytes of every candidate."""
    say(out)
    say(out, f"A model bound by {workload.bound_by}", style="bold")
    say(out, f"{made.about}; {made.parameters:,} parameters, on {made.device}")
    state = Size.of(row.state_bytes for row in made.rows)
    saved = Size.of(row.saved_bytes for row in made.rows)
    headers = ("", "ms", "time / fp32", f"states {state.unit}", f"backward {saved.unit}")
    shown = table(out, *headers, right=(1, 2, 3, 4))
    for row in made.rows:
        time = f"{row.milliseconds:.3g}" if math.isfinite(row.milliseconds) else ""
        ratio = f"over {row.slow:.0f}, left out" if row.slow else _ratio(row.to_fp32, made.control)
        shown.add_row(row.label, time, ratio, state(row.state_bytes), saved(row.saved_bytes))
    out.print(shown)
    control = made.control
    say(out, f"medians of {control.rounds} rounds in turns, 90 % intervals; fp32 beside itself: {interval(control)}")


def _ratio(ratio: Ratio | None, control: Ratio) -> str:
    if ratio is None:
        return ""
    return f"{'undecided, ' if ratio.finer_than(control) else ''}{interval(ratio)}"


def print_accuracy(out: Console, made: Comparison) -> None:
    """Print the result of every candidate."""
    say(out)
    say(out, f"Accuracy of {made.task}: {made.about}", style="bold")
    say(out, setting(made))
    out.print(result_table(out, made))


def print_rescue(out: Console, rescued: Rescue) -> None:
    """Print the verdict as `step.explain()` prints it, and how the run went on."""
    say(out)
    say(out, f"A run in fp16 that breaks in step {rescued.broken_at}: print(step.explain())", style="bold")
    for line in str(rescued.verdict).splitlines():
        say(out, line)
