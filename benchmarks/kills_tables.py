"""The table of runs that were killed, from its JSON file."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table
from benchmarks.stamp import told

__all__ = ["kills_table"]


def kills_table(report: dict[str, Any]) -> str:
    """Return how many runs were killed, and how many of them ended with the bits of one that was not disturbed."""
    if not report:
        return "Not measured here."
    rows = [
        [row["title"], *(str(row[key]) for key in ("runs", "killed", "cut_off", "restarts", "damaged", "equal"))]
        for row in report["cases"].values()
    ]
    if disk := report.get("disk"):
        rows.append(["one process, disk full at a random byte", str(disk["runs"]), *["-"] * 4, str(disk["equal"])])
    head = ["run", "runs", "killed", "cut off", "restarts", "damaged checkpoints", "same final bits"]
    text = (
        f"`{report['command']}`, torch {report['torch']}, {report['updates']} updates, a checkpoint after every "
        f"{report['every']}. {told(report.get('commit', ''))}"
    )
    return f"{text}\n\n{table(head, rows)}"
