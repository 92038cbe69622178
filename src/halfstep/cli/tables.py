"""Tables of a comparison: what happened to the result, and what a step costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.numbers import counted
from halfstep.cli.terminal import say, table
from halfstep.tasks.candidates import AMP
from halfstep.tasks.compare import Comparison
from halfstep.tasks.measure import ENOUGH_SEEDS, Difference
from halfstep.timing import Ratio

__all__ = ["amp_label", "extremes", "policy_notes", "print_comparison", "ratio_text", "result_table", "setting"]

COLOURS = {"within noise": "green", "better": "green", "worse": "red", "diverged": "red"}
MEGABYTE = 1e6


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print both tables and how to read them; Markdown where the console is no terminal."""
    seeds = len(comparison.seeds)
    margin = f"{comparison.margin:.3g}"
    say(console)
    say(console, f"{comparison.task}: {comparison.about}", style="bold")
    say(console, setting(comparison))
    console.print(result_table(console, comparison))
    say(console, f"within noise: the 90 % interval of the difference lies inside +-{margin}, fixed beforehand")
    if seeds < ENOUGH_SEEDS:
        say(console, f"with {seeds} of {ENOUGH_SEEDS} seeds this is only an indication", style="yellow")
    console.print(_cost_table(console, comparison))
    say(console, _on_times(comparison))
    for line in policy_notes(comparison):
        say(console, line)


def setting(comparison: Comparison) -> str:
    """Return in words how long the runs were, how many, and where."""
    runs = f"{counted(comparison.steps, 'step')}, {counted(len(comparison.seeds), 'seed')}, on {comparison.device}"
    return f"{runs}; same weights, same batches, steps in turns"


def amp_label(comparison: Comparison) -> str:
    """Return the label of the row that times are compared with."""
    return next(row.label for row in comparison.rows if row.label.startswith(AMP))


def extremes(values: Sequence[float]) -> str:
    """Return one number if all seeds agree, else the smallest and the largest."""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def policy_notes(comparison: Comparison) -> list[str]:
    """Return the notes of the plans, each once behind its policies, and a note on what was left out."""
    notes: dict[str, list[str]] = {}
    for row in comparison.rows:
        for note in row.notes:
            notes.setdefault(note, []).append(row.label)
    lines = [f"{', '.join(labels)}: {note}" for note, labels in notes.items()]
    if comparison.device == "cpu" and not any(row.label == "torch.amp fp16" for row in comparison.rows):
        lines.append(
            "torch.amp fp16 was not run: on CPUs without fp16 units torch's fp16 kernels take many times fp32's time; "
            "--policies torch.amp:fp16 adds it"
        )
    return lines


def _table(console: Console, *headers: str) -> Table:
    return table(console, *headers, right=tuple(range(1, len(headers))))


def result_table(console: Console, comparison: Comparison) -> Table:
    """Return what became of the result under every policy."""
    """Return what became of the result under every policy."""
    made = _table(console, "policy", comparison.metric, "minus fp32, 90 % interval", "verdict", "skipped", "scale")
    for row in comparison.rows:
        plain = row.label == "fp32"
        made.add_row(
            Text(row.label),
            f"{statistics.fmean(row.metrics):.5g}",
            "" if plain else _interval(row.difference),
            "" if plain else Text(row.difference.verdict, style=COLOURS.get(row.difference.verdict, "yellow")),
            extremes(row.skipped),
            extremes(row.scale),
        )
    return made


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.3g}"
    return f"{difference.mean:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}]"


def _cost_table(console: Console, comparison: Comparison) -> Table:
    amp = amp_label(comparison)
    headers = ("ms a step", "time / fp32", f"time / {amp}", "parameters + state, MB", "saved for backward, MB")
    made = _table(console, "policy", *headers)
    for row in comparison.rows:
        made.add_row(
            Text(row.label), f"{row.milliseconds:.3g}", ratio_text(row.to_fp32, comparison.control),
            ratio_text(row.to_amp, comparison.control), f"{row.state_bytes / MEGABYTE:.3f}",
            f"{row.saved_bytes / MEGABYTE:.3f}",
        )  # fmt: skip
    return made


def ratio_text(ratio: Ratio | None, control: Ratio | None) -> str:
    """Return a ratio, or that it is finer than `control` can resolve; "" if there is none."""
    if ratio is None or control is None:
        return ""
    return f"undecided ({ratio.median:.3f})" if ratio.finer_than(control) else f"{ratio.median:.3f}"


def _on_times(comparison: Comparison) -> str:
    control = comparison.control
    if control is None:
        return "no times: a run is too short for more than its warm-up"
    equal = "the same result, bit for bit" if comparison.repeatable else "NOT the same result: runs are not repeatable"
    return (
        f"times are medians of paired ratios; undecided: finer than A/A, torch.amp twice = {control.median:.3f} "
        f"[{control.low:.3f}, {control.high:.3f}] ({equal})"
    )
