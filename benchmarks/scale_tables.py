"""Tables of several processes beside one, from the three JSON files of `benchmarks.scale`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.markdown import table

__all__ = ["collectives_table", "parity_table", "ranks_table", "scale_blocks"]

NOTHING = "Not measured here."
Rows = list[dict[str, Any]]


def scale_blocks(parity: dict[str, Any], ranks: dict[str, Any], collectives: dict[str, Any]) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    return {
        "parity": parity_table(parity),
        "ranks": ranks_table(ranks),
        "collectives": collectives_table(collectives),
    }


def parity_table(report: dict[str, Any]) -> str:
    """Return how far each strategy is from one process, and torch's own loop of it."""

    def cells(row: dict[str, Any]) -> list[str]:
        ours = _distance(row["deviation"]) + ("" if row["ranks_equal"] else ", **ranks differ**")
        late = " **above it**" if row["deviation"] > row["bound"] else ""
        return [ours, f"{row['bound']:.0e}{late}", _distance(row["torch"])]

    return _table(report, ["from one process", "bound", "torch's loop from one process"], cells)


def ranks_table(report: dict[str, Any]) -> str:
    """Return whether ranks skip together, have one scale and the same weights."""

    def cells(row: dict[str, Any]) -> list[str]:
        low, high = row["scales"][0], row["scales"][-1]
        scales = "no scale" if low == high == 1.0 else f"{_yes(row['scales_equal'])}, {low:g} to {high:g}"
        counts = [f"{row['updates']:,}", str(row["overflows"]), _yes(row["skipped_as_expected"])]
        return [*counts, scales, _yes(row["weights_equal"] and row["finite"])]

    head = ["updates", "with an overflow", "the same skipped on all ranks", "scales equal", "weights equal and finite"]
    return _table(report, head, cells)


def collectives_table(report: dict[str, Any]) -> str:
    """Return what a step sends beside forward and backward passes: collectives and bytes of a rank."""

    def cells(row: dict[str, Any]) -> list[str]:
        ours, bad, torchs = (_sent(row[key]) for key in ("good", "bad", "torch"))
        return [f"{row['passes']['number']}, {row['passes']['bytes']:,} B", ours, bad, torchs]

    head = ["passes of torch alone", "`TrainStep` adds", "in a skipped step", "torch's loop adds"]
    return _table(report, head, cells)


def _table(report: dict[str, Any], head: list[str], cells: Callable[[dict[str, Any]], list[str]]) -> str:
    rows: Rows = report.get("rows", [])
    if not rows:
        return NOTHING
    made = [[row["strategy"], str(row["processes"]), f"`{row['policy']}`", *cells(row)] for row in rows]
    return table(["strategy", "processes", "policy", *head], made)


def _distance(value: float | str) -> str:
    if isinstance(value, str):
        return f"raises {value.partition(':')[0]}"
    return "bit-equal" if value == 0.0 else f"{value:.0e}"


def _sent(value: dict[str, Any] | str) -> str:
    """Return number and bytes of collectives; a policy whose passes send less has negative bytes."""
    if isinstance(value, str):
        return f"raises {value.partition(':')[0]}"
    return "nothing" if not value["number"] and not value["bytes"] else f"{value['number']:+d}, {value['bytes']:+,} B"


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"
