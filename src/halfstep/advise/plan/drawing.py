"""Drawing: the memory of a step over its time, as text and as a chart. In: a `MemoryPlan`. Out: lines, a `Figure`.

Each column of the text is a stretch of the step at its highest point; a letter is a share of that height, by part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from halfstep.advise.plan.fit import gib, unit_of
from halfstep.advise.plan.parts import PARTS, PHASES, Moment
from halfstep.report import AreaChart, Figure, Key, Series

if TYPE_CHECKING:
    from halfstep.advise.plan.memory import MemoryPlan

__all__ = ["drawing", "figure"]

LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "P",
        "precise values": "V",
        "buffers": "B",
        "optimizer state": "O",
        "low copies": "C",
        "gathered parameters": "A",
        "gradients": "G",
        "saved for backward": "S",
        "communication": "N",
        "batch": "I",
        "temporaries": "T",
    }
)
"""Part -> its letter in the drawing."""

WIDTH, HEIGHT = 72, 14
"""Columns and lines of a drawing."""


def drawing(plan: MemoryPlan, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Return the step as lines of text: time to the right, bytes upwards, a letter for each part.

    Args:
        plan: the plan.
        width: columns of the step.
        height: lines of the highest point.
    """
    columns = _columns(plan.timeline, width)
    if not columns:
        return []
    top = max(moment.total for moment in columns)
    peak = next(n for n, moment in enumerate(columns) if moment.total == top)
    stacks = [_stack(moment, top, height) for moment in columns]
    label = gib(top).rjust(10)
    lines = [f"{label if line == height - 1 else ' ' * 10} |{''.join(s[line] for s in stacks).rstrip()}"
             for line in reversed(range(height))]  # fmt: skip
    lines.append(f"{'0'.rjust(10)} +{'-' * len(columns)}")
    lines.append(f"{' ' * 12}{_axis(columns)}")
    lines.append(f"{' ' * 12}{' ' * peak}^ peak: {place(plan.peak_at)}")
    used = [part for part in PARTS if any(moment.bytes[PARTS.index(part)] for moment in columns)]
    lines.append(f"{' ' * 12}{', '.join(f'{LETTERS[part]} {part}' for part in used)}")
    return lines


def place(moment: Moment) -> str:
    """Return where in a step a moment lies, in words."""
    where = f"{moment.phase}, {moment.name.removeprefix('aten::')}" if moment.name else moment.phase
    return f"{where} of {moment.module}" if moment.module else where


def figure(plan: MemoryPlan, limit: int = 0, label: str = "") -> Figure:
    """Return the step as a picture: bytes of each part over the operators of a step.

    Args:
        plan: the plan.
        limit: bytes of a GPU, drawn as a line; 0 for none.
        label: that GPU's name.
    """
    parts = [part for part in PARTS if any(m.bytes[PARTS.index(part)] for m in plan.timeline)]
    at = tuple(float(moment.operator) for moment in plan.timeline)
    unit, one = unit_of(plan.peak_at.total)
    series = tuple(
        Series(part, at, tuple(m.bytes[PARTS.index(part)] / one for m in plan.timeline), key=Key(n % 6 + 1, n >= 6))
        for n, part in enumerate(parts)  # six hues, then the same paler
    )
    line = f" The dashed line is what torch can allocate on {label}." if limit else ""
    return Figure(
        "Memory of a step",
        "From left to right the operators of one step after the first: forward, backward, update; "
        f"{unit} alive, by part. Its highest point, {gib(plan.peak_at.total)}, is in {place(plan.peak_at)}.{line}",
        f"Memory over a step; highest point {gib(plan.peak_at.total)} in {place(plan.peak_at)}.",
        AreaChart("operators run", series, limit / one if limit else None),
    )


def _columns(timeline: Sequence[Moment], width: int) -> list[Moment]:
    """Return the highest moment of each of `width` stretches, of every phase at least one."""
    if len(timeline) <= width:
        return list(timeline)
    found: list[Moment] = []
    for phase in PHASES:
        those = [moment for moment in timeline if moment.phase == phase]
        count = min(len(those), max(1, round(width * len(those) / len(timeline))))
        for n in range(count):
            stretch = those[n * len(those) // count : (n + 1) * len(those) // count]
            found.append(max(stretch, key=lambda moment: moment.total))
    return found


def _stack(moment: Moment, top: int, height: int) -> str:
    """Return a column from bottom to top; a line shows the part that is at its middle."""
    letters = []
    for line in range(height):
        middle, below, letter = (line + 0.5) / height * top, 0, " "
        for part, size in zip(PARTS, moment.bytes, strict=True):
            below += size
            if middle <= below:
                letter = LETTERS[part]
                break
        letters.append(letter)
    return "".join(letters)


def _axis(columns: Sequence[Moment]) -> str:
    """Return the names of the phases, each at the column where it begins; the last may be longer than its phase."""
    line = ""
    for phase in PHASES:
        first = next((n for n, moment in enumerate(columns) if moment.phase == phase), None)
        if first is not None:
            line = f"{line[: max(first - 1, 0)]:<{first}}{phase}"
    return line
