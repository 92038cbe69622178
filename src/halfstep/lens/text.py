"""Text: an audit in a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.lens.table import Audit

__all__ = ["text"]

SHOWN = 20


def percent(value: float) -> str:
    """Return a share as per cent; "" for none."""
    if math.isnan(value) or value == 0:
        return ""
    return f"{100 * value:.2g}%" if value >= 0.0001 else "<0.01%"


def number(value: float) -> str:
    """Return a number with three digits; "" if it is not known."""
    return "" if math.isnan(value) else f"{value:.3g}"


def text(audit: Audit) -> str:
    """Return the findings and the rows that lose most."""
    headers = ("module", "operator", "role", "format", "amax", "headroom", "underflow", "subnormal", "error", "accumulated", "time")
    lines = [headers]
    for row in audit.rows[:SHOWN]:
        lines.append((row.module, row.op, row.role, row.format, number(row.amax), number(row.headroom),
            percent(row.underflow), percent(row.subnormal), number(row.error), number(row.accumulated), percent(row.time)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
