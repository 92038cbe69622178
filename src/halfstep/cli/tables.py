"""Tables of a comparison: what happened to the result, and what a step costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.tasks.compare import Comparison, Row
from halfstep.tasks.measure import ENOUGH_SEEDS, Difference, Ratio

__all__ = ["print_comparison"]

COLOURS = {"within noise": "green", "better": "green", "worse": "red", "diverged": "red"}
MEGABYTE = 1e6


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print both tables and what must be known to read them; Markdown where the console is no terminal."""
    seeds = len(comparison.seeds)
    margin = f"{comparison.margin:.3g}"
    _say(console, "")
    _say(console, f"{comparison.task}: {comparison.about}", style="bold")
    runs = f"{comparison.steps} steps, {seeds} {'seed' if seeds == 1 else 'seeds'}, on {comparison.device}"
    _say(console, f"{runs}; same weights, same batches, steps in turns")
    console.print(_result_table(console, comparison))
    _say(console, f"within noise: the 90 % interval of the difference lies inside +-{margin}, fixed beforehand")
    if seeds < ENOUGH_SEEDS:
        _say(console, f"with {seeds} of {ENOUGH_SEEDS} seeds this is only an indication", style="yellow")
    console.print(_cost_table(console, comparison))
    for line in _footnotes(comparison):
        _say(console, line)


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False)


def _table(console: Console, *headers: str) -> Table:
    table = Table(box=box.ROUNDED if console.is_terminal else box.MARKDOWN)
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place == 0 else "right")
    return table


def _result_table(console: Console, comparison: Comparison) -> Table:
    table = _table(console, "policy", comparison.metric, "minus fp32, 90 % interval", "verdict", "skipped", "scale")
    for row in comparison.rows:
        plain = row.label == "fp32"
        table.add_row(
            Text(row.label),
            f"{statistics.fmean(row.metrics):.5g}",
            "" if plain else _interval(row.difference),
            "" if plain else Text(row.difference.verdict, style=COLOURS.get(row.difference.verdict, "yellow")),
            _numbers(row.skipped),
            _numbers(row.scale),
        )
    return table


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.3g}"
    return f"{difference.mean:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}]"


def _numbers(values: Sequence[float]) -> str:
    """Return one number if all seeds agree, else the smallest and the largest."""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _cost_table(console: Console, comparison: Comparison) -> Table:
    amp = next(r.label for r in comparison.rows if r.to_amp is None)
    table = _table(
        console,
        "policy",
        "ms a step",
        "time / fp32",
        f"time / {amp}",
        "parameters + state, MB",
        "saved for backward, MB",
    )
    for row in comparison.rows:
        table.add_row(
            Text(row.label),
            f"{row.milliseconds:.3g}",
            _ratio(row.to_fp32, comparison.control),
            _ratio(row.to_amp, comparison.control),
            f"{row.state_bytes / MEGABYTE:.3f}",
            f"{row.saved_bytes / MEGABYTE:.3f}",
        )
    return table


def _ratio(ratio: Ratio | None, control: Ratio | None) -> str:
    if ratio is None or control is None:
        return ""
    return f"undecided ({ratio.median:.3f})" if ratio.finer_than(control) else f"{ratio.median:.3f}"


def _footnotes(comparison: Comparison) -> list[str]:
    lines = []
    control = comparison.control
    if control is None:
        lines.append("no times: a run is too short for more than its warm-up")
    else:
        equal = (
            "the same result, bit for bit" if comparison.repeatable else "NOT the same result: runs are not repeatable"
        )
        lines.append(
            f"times are medians of paired ratios; undecided: finer than A/A, torch.amp twice = {control.median:.3f} "
            f"[{control.low:.3f}, {control.high:.3f}] ({equal})"
        )
    notes: dict[str, list[str]] = {}
    for row in comparison.rows:
        for note in row.notes:
            notes.setdefault(note, []).append(row.label)
    lines += [f"{', '.join(labels)}: {note}" for note, labels in notes.items()]
    if comparison.device == "cpu" and not any(_is_native_fp16(row) for row in comparison.rows):
        lines.append(
            "torch.amp fp16 was not run: on CPUs without fp16 units torch's fp16 kernels take many times fp32's time; "
            "--policies torch.amp:fp16 adds it"
        )
    return lines


def _is_native_fp16(row: Row) -> bool:
    return row.label == "torch.amp fp16"
