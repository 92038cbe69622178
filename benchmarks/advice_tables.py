"""Tables of what `hs.tune` and `hs.plan` reach, out of their JSON files."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import ratio, table

__all__ = ["plan_table", "tune_table"]

NOTHING = "Not measured here."


def tune_table(report: dict[str, Any]) -> str:
    """Return the tuned policy of each task beside the presets, a row for each task."""
    if not report:
        return NOTHING
    rows = []
    for task in report["tasks"]:
        lost = sorted({row["label"] for row in task["rows"] if row["verdict"] in ("worse", "diverged")} - {"tuned"})
        rows.append(
            [
                f"{task['task']}: {task['about'].partition(';')[0]}",
                f"`{task['chosen']['label']}`",
                task["verdict"],
                ", ".join(lost) or "-",
                f"`{task['fastest_not_worse']}`",
                ratio(task["ratio"]),
                ratio(task["control"]),
            ]
        )
    head = ["task", "chosen", "proof", "presets shown worse", "fastest other preset", "tuned / it", "fp32 / fp32 again"]
    return table(head, rows)


def plan_table(report: dict[str, Any]) -> str:
    """Return how far planned bytes are from counted ones, a row for each model: the largest error over its policies."""
    if not report:
        return NOTHING
    rows = []
    for name, policies in report["cases"].items():
        between, peak = (
            max((row[f"{what}_ratio"] for row in policies.values()), key=lambda value: abs(value - 1.0))
            for what in ("persistent", "peak")
        )
        counted = max(row["counted_peak"] for row in policies.values()) / 2**20
        rows.append([name, ", ".join(policies), f"{counted:.1f}", f"{between:.4f}", f"{peak:.4f}"])
    head = ["model", "policies", "largest peak, MiB", "between steps, planned / counted", "peak, planned / counted"]
    return table(head, rows)
