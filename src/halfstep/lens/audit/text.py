"""Text: an audit in words and as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from halfstep.lens.audit.rows import Row
from halfstep.lens.finding import Finding

if TYPE_CHECKING:
    from halfstep.lens.audit.table import Audit

__all__ = ["COLUMNS", "cells", "grouped", "headline", "number", "percent", "quiet", "text"]

SHOWN = 16
"""Rows of a printed audit: what loses most."""

PLACES = 4
"""Places named of each group of findings."""

COLUMNS = ("module", "operator", "role", "format", "amax", "headroom", "zero", "inf, nan", "underflow", "subnormal",
           "error", "accumulated", "time")  # fmt: skip


def percent(share: float) -> str:
    """Return a share in per cent with two digits; "" for none or unknown."""
    if math.isnan(share) or share <= 0.0:
        return ""
    if share >= 0.0995:
        return f"{100 * min(share, 99.9):.0f} %"
    return f"{100 * share:.2g} %" if share >= 1e-5 else "<0.001 %"


def number(value: float) -> str:
    """Return a number with three digits; "" if it is unknown."""
    if math.isnan(value) or math.isinf(value):
        return ""
    return f"{value:.3g}"


def cells(row: Row) -> tuple[str, ...]:
    """Return the row as text, a cell for each of `COLUMNS`."""
    operator = f"{row.op} {row.parameter.rpartition('.')[2]}" if row.parameter else row.op
    return (
        row.module or "(root)",
        operator,
        row.role,
        row.format,
        number(row.amax),
        f"{row.headroom:.1f}" if math.isfinite(row.headroom) else "",
        percent(row.zeros),
        percent(row.nonfinite),
        percent(row.underflow),
        percent(row.subnormal),
        percent(row.error),
        percent(row.accumulated),
        percent(row.time),
    )


def headline(audit: Audit) -> str:
    """Return what was audited, in one line."""
    policy = audit.plan.policy
    name = f"{audit.policy.name} {policy.dtype}".strip()
    steps = f"{audit.steps} step{'s' * (audit.steps != 1)}"
    scale = f", loss scale {audit.scale:g}" if audit.scale != 1.0 else ""
    skipped = f", {audit.skipped} skipped on the way" if audit.skipped else ""
    return (
        f"audit of {audit.plan.model} under {name} on {audit.plan.device}: {steps}{scale}{skipped}, {len(audit)} rows"
    )


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Return findings of one kind with one remedy together: the gravest of them, and all their places."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        key = finding.kind, finding.diff or finding.remedy
        groups.setdefault(key, []).append(finding)
    return [(members[0], [finding.place for finding in members]) for members in groups.values()]


def quiet(audit: Audit) -> str:
    """Return what to say where there are no findings: nothing is lost, but steps may still not be finite."""
    if audit.bad:
        too = ", in fp32 too" if audit.bad_in_fp32 == audit.bad else ""
        return f"no findings of precision, but {audit.bad} of {audit.steps} steps were not finite{too}"
    return "no findings: nothing underflows, overflows, is swallowed or far off"


def text(audit: Audit) -> str:
    """Return the findings and the rows that lose most."""
    lines = [headline(audit)]
    groups = grouped(audit.findings())
    if not groups:
        lines.append(quiet(audit))
    for finding, places in groups:
        more = f" and {len(places) - PLACES} more" if len(places) > PLACES else ""
        lines.append(f"{finding.kind}: {', '.join(places[:PLACES])}{more}")
        if finding.line:
            lines.append(f"  {finding.line}")
        lines += [f"  {finding.cause}", f"  remedy: {finding.remedy}"]
        lines += [f"    {line}" for line in finding.diff.splitlines()]
    lines += [f"note: {note}" for note in audit.notes]
    rows = audit.worst(SHOWN)
    return "\n".join([*lines, *_columns([COLUMNS, *map(cells, rows)])])


def _columns(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table; columns of numbers flush right."""
    told = [
        place for place, word in enumerate(table[0]) if word != "inf, nan" or any(line[place] for line in table[1:])
    ]
    table = [tuple(line[place] for place in told) for line in table]
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]

    def flush(place: int, word: str) -> str:
        return word.ljust(widths[place]) if place < 4 else word.rjust(widths[place])

    return ["  ".join(flush(place, word) for place, word in enumerate(line)).rstrip() for line in table]
