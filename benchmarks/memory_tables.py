"""Tables of docs/tables/: bytes and page faults of a step, and what steps do on fake CUDA tensors."""

from __future__ import annotations

from typing import Any

from benchmarks.goals import MIB
from benchmarks.markdown import megabytes, table, whole
from benchmarks.speed_tables import BESIDE, SHOWN, title
from benchmarks.stamp import told

NOTHING = "Not measured here."


def memory(bench: dict[str, Any]) -> str:
    """Return every case under its heading: bytes, casts and page faults of its candidates."""
    parts = []
    for case in bench["cases"].values():
        rows = []
        for label, data in case["rows"].items():
            counts = data["counts"] or {}
            if label in BESIDE:
                continue
            casts = counts.get("casts")
            rows.append(
                [
                    f"`{label}`",
                    megabytes(counts.get("saved_bytes")),
                    megabytes(counts.get("state_bytes")),
                    megabytes(counts.get("peak_bytes")),
                    "-" if casts is None else f"{casts} / {megabytes(counts['cast_bytes'])}",
                    f"{data['faults']:.0f}" if "faults" in data else "-",
                ]
            )
        head = ["candidate", "saved for backward, MB", "state, MB", "peak, MB", "casts / MB", "faults"]
        parts.append(f"### {title(case)}\n{table(head, rows)}")
    return "\n\n".join(parts)


def faults(report: dict[str, Any]) -> str:
    """Return the page faults of a step, candidate by candidate."""
    if not report:
        return NOTHING
    rows = []
    for case in report["cases"].values():
        found = [case["rows"][label] for label in SHOWN]
        together = max(row["together"] for row in found)
        left = [whole(row["alone_left"]) for row in found if "alone_left" in row]
        rows.append([case["title"], *(whole(row["alone"]) for row in found), whole(together), *left])
    head = ["faults a step", *(f"`{label}`" for label in SHOWN), f"any among {report['together']}"]
    return table([*head, *(f"`{label}`, malloc as it is" for label in SHOWN[1:])], rows)


def process_memory(report: dict[str, Any]) -> str:
    """Return the largest memory of a process, candidate by candidate."""
    if not report:
        return NOTHING
    rows = []
    for case in report["cases"].values():
        found = [case["rows"][label] for label in SHOWN]
        left = [whole(row["MiB_left"]) for row in found if "MiB_left" in row]
        rows.append([case["title"], *(whole(row["MiB"]) for row in found), *left])
    head = ["MiB at most", *(f"`{label}`" for label in SHOWN)]
    return table([*head, *(f"`{label}`, malloc as it is" for label in SHOWN[1:])], rows)


def task_memory(tasks: dict[str, dict[str, Any]]) -> str:
    """Return what the programs of the accuracy tables store: a row for each policy, two columns for each task."""
    labels = [found["label"] for found in next(iter(tasks.values()))["rows"]]
    rows = []
    for label in labels:
        cells = [label]
        for task in tasks.values():
            found = next(row for row in task["rows"] if row["label"] == label)
            cells += [f"{found['state_bytes'] / 1e6:.2f}", f"{found['saved_bytes'] / 1e6:.2f}"]
        rows.append(cells)
    head = [f"{name}: {what}, MB" for name in tasks for what in ("state", "saved")]
    return table(["policy", *head], rows)


def counted(counts: dict[str, Any]) -> str:
    """Return what steps do on fake CUDA tensors: every program of every model."""
    if not counts:
        return "Not counted here."
    rows = []
    for model, programs in counts["models"].items():
        for program, data in programs.items():
            if program.startswith("torch:") or program.endswith(":bf16"):  # close to O1 and to fp16; in the JSON
                continue
            s = data["summary"]
            around = s["tail_bytes_per_parameter"] + s["weight_bytes_per_parameter"]
            numbers = [f"{s['casts']} / {s['cast_bytes'] / MIB:.1f}", f"{s['bytes'] / MIB:.0f}", f"{around:.1f}"]
            rows.append([model, f"`{program}`", *numbers, str(s["launches_tail"]), str(s["syncs"])])
    head = ["model", "program", "casts / MiB", "MiB in all", "bytes a parameter around the optimizer"]
    text = f"`{counts['command']}`, torch {counts['torch']}: {counts['device']}. {told(counts.get('commit', ''))}"
    return f"{text}\n\n{table([*head, 'launches of the tail', 'waits of the host'], rows)}"
