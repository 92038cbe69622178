"""Story: the operators that led to the place of a verdict, and how large their numbers were.

Input: the call at the place, linked to the calls that made its arguments. Output: rows of `Magnitude`, the place last,
and a sentence on where magnitudes left the normal range.
"""

from __future__ import annotations

import math

from halfstep.lens.box.origins import CallRecord
from halfstep.lens.verdict import Magnitude

__all__ = ["first_extreme", "path", "story"]

ROWS = 8  # rows of a story
NEAREST = 3  # so many rows are the place and what leads to it directly; the others are where magnitudes changed most
EXTREME = 1e3  # activations and gradients above it are out of the normal range: their products pass the end of fp16
TINY = 1e-30  # stands for a magnitude of 0 in ratios


def path(place: CallRecord, *, small: bool = False) -> list[CallRecord]:
    """Return the calls from the first to the place, each the argument of the next that matters most.

    That is an argument that is not finite, else the largest or, with `small`, the smallest, as in a division by 0.
    """
    rows, seen = [place], {place}
    while parents := [p for p in rows[-1].parents if p not in seen and p.dtype is not None]:
        spoiled = [p for p in parents if not p.finite_out]
        rows.append((min if small else max)(spoiled or parents, key=lambda p: p.made))
        seen.add(rows[-1])
    rows.reverse()
    return [row for row, following in zip(rows, [*rows[1:], None], strict=True) if not _alike(row, following)]


def _alike(row: CallRecord, following: CallRecord | None) -> bool:
    """Return whether two calls belong to one operator of the user's, such as the kernels of its backward pass."""
    if following is None:
        return False
    one, two = row.site, following.site
    return (one.op, one.module, one.line, one.phase) == (two.op, two.module, two.line, two.phase)


def story(rows: list[CallRecord]) -> tuple[Magnitude, ...]:
    """Return at most `ROWS` rows of a path: the last ones, and those before that changed the magnitude most."""
    early = range(max(len(rows) - NEAREST, 0))
    changed = sorted(early, key=lambda index: _change(rows, index), reverse=True)[: ROWS - NEAREST]
    kept = [*sorted(changed), *range(len(early), len(rows))]
    return tuple(_row(rows[index]) for index in kept)


def _change(rows: list[CallRecord], index: int) -> float:
    """Return by how many powers of e a call changed the magnitude of what it was given."""
    before = rows[index - 1].made if index else rows[index].largest
    return abs(math.log(max(rows[index].made, TINY) / max(before, TINY)))


def _row(call: CallRecord) -> Magnitude:
    return Magnitude(
        op=call.site.op,
        module=call.site.module,
        line=call.site.line,
        phase=call.site.phase,
        dtype=str(call.dtype).removeprefix("torch."),
        largest=call.made,
        limit=call.limit,
        finite=call.finite_out,
    )


def first_extreme(rows: list[CallRecord]) -> str:
    """Return where on a path before the place magnitudes left the normal range, "" if only at the place."""
    if rows[0].largest > EXTREME and rows[0].carrier:
        return f"magnitudes are out of the normal range from {rows[0].carrier} on: it holds {rows[0].largest:.6g}"
    for index, row in enumerate(rows[:-1]):
        if row.made > EXTREME and row.site.phase == rows[-1].site.phase:
            before = rows[index - 1].made if index else row.largest
            module = f" in {row.site.module}" if row.site.module else ""
            grew = f"{before:.4g} before it, {row.made:.4g} after"
            return f"magnitudes passed {EXTREME:g} first in {row.site.op}{module} at {row.site.line}: {grew}"
    return ""
