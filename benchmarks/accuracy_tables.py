"""Tables of docs/tables/accuracy.md: results and loss curves beside fp32's."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table


def metrics(task: dict[str, Any]) -> str:
    """Return the results of a task: a row for each policy."""
    rows = []
    for found in task["rows"]:
        values = found["metrics"]
        difference = found["difference"]
        own = found["label"] == "fp32"
        interval = "" if own else f"{difference['mean']:+.4g} [{difference['low']:+.4g}, {difference['high']:+.4g}]"
        rows.append(
            [
                found["label"],
                f"{sum(values) / len(values):.4g}",
                interval,
                "" if own else difference["verdict"],
                f"{sum(found['skipped']) / len(values):.1f}",
                f"{found['scale'][0]:g}",
            ]
        )
    head = [
        "policy",
        task["metric"],
        "minus fp32, 90 % interval",
        "verdict",
        "skipped steps a run",
        "final scale",
    ]
    about = f"{task['about']}. {task['steps']} steps, {len(task['seeds'])} seeds, margin {task['margin']:.4g}."
    return about + "\n\n" + table(head, rows)


def spread(bench: dict[str, Any]) -> str:
    """Return how much torch.amp's deviation from fp32 differs from start to start."""
    rows = [
        [title, str(len(found)), f"{min(found):.2g} to {max(found):.2g}", f"{max(found) / min(found):.1f}"]
        for title, found in bench["micro"]["spread"].items()
    ]
    return table(["model", "starts", "torch.amp's deviation from fp32, nats", "largest / smallest"], rows)
