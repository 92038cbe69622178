"""Tables of several processes beside one, from the three JSON files of `benchmarks.scale`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.markdown import table

__all__ = ["scale_blocks"]

NOTHING = "Not measured here."
Rows = list[dict[str, Any]]


def scale_blocks(parity: dict[str, Any], ranks: dict[str, Any], collectives: dict[str, Any]) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    return {
        "parity summary": parity_summary(parity),
        "parity": parity_table(parity),
        "ranks": ranks_table(ranks),
        "collectives": collectives_table(collectives),
        "source scale": scale_source(parity),
        "scale on paper": paper(collectives),
    }


def parity_table(report: dict[str, Any]) -> str:
    """Return how far each strategy is from one process, and torch's own loop of it."""

    def cells(row: dict[str, Any]) -> list[str]:
        ours = _distance(row["deviation"]) + ("" if row["ranks_equal"] else ", **ranks differ**")
        late = " **above it**" if row["deviation"] > row["bound"] else ""
        return [ours, f"{row['bound']:.0e}{late}", _distance(row["torch"])]

    return _table(report, ["from one process", "bound", "torch's loop from one process"], cells)


def parity_summary(report: dict[str, Any]) -> str:
    """Return each strategy in a row: how many runs are bit-equal to one process, and how near the others are."""
    rows: Rows = report.get("rows", [])
    if not rows:
        return NOTHING
    made = []
    for name in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == name]
        processes = " and ".join(str(n) for n in sorted({row["processes"] for row in mine}))
        equal = sum(row["deviation"] == 0.0 for row in mine)
        raises = all(isinstance(row["torch"], str) for row in mine)
        theirs = "raises" if raises else f"{sum(row['torch'] == 0.0 for row in mine)} of {len(mine)}"
        furthest = max(row["deviation"] / row["bound"] for row in mine)
        made.append([name, processes, f"{equal} of {len(mine)}", f"{furthest:.2f}", theirs])
    head = ["strategy", "processes", "bit-equal to one process", "furthest, as a share of its bound"]
    return table([*head, "torch's loop bit-equal to its one process"], made)


def ranks_table(report: dict[str, Any]) -> str:
    """Return whether ranks skip together, have one scale and the same weights."""

    def cells(row: dict[str, Any]) -> list[str]:
        low, high = row["scales"][0], row["scales"][-1]
        scales = "no scale" if low == high == 1.0 else f"{_yes(row['scales_equal'])}, {low:g} to {high:g}"
        overflows = f"{row['overflows']} of {row['updates']:,}"
        return [overflows, _yes(row["skipped_as_expected"]), scales, _yes(row["weights_equal"] and row["finite"])]

    head = ["updates with an overflow", "the same skipped on all ranks", "scales equal", "weights equal and finite"]
    return _table(report, head, cells)


def collectives_table(report: dict[str, Any]) -> str:
    """Return what a step sends beside forward and backward passes: collectives and bytes of a rank."""

    def cells(row: dict[str, Any]) -> list[str]:
        ours, bad, torchs = (_sent(row[key]) for key in ("good", "bad", "torch"))
        return [f"{row['passes']['number']}, {row['passes']['bytes']:,} B", ours, bad, torchs]

    head = ["passes of torch alone", "`TrainStep` adds", "in a skipped step", "torch's loop adds"]
    return _table(report, head, cells)


def scale_source(report: dict[str, Any]) -> str:
    """Return the command and the machine."""
    if not report:
        return NOTHING
    machine = report["machine"]
    return f"`{report['command']}` on {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, gloo."


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


# ------------------------------------------------------------------ on paper

ELEMENTS, TENSORS, UNITS = 6_738_415_616, 291, 32  # Llama 2 7B: parameters, tensors, blocks
HOP = 5e-6  # seconds: assumed latency of one hop between devices
DEVICES = ((8, 8), (1024, 1024), (100_000, 1024))  # all, and how many share one copy of the weights
WAYS = (
    # policy, bytes an element stored, bytes sent by an all-gather, by a reduction, groups of a unit
    ("`mixed`", 12, 2, 4, 2),
    ("`O2`, `master='split'`", 12, 2, 2, 2),
    ("`pure`, `master='split'`", 12, 2, 2, 1),
    ("the same, `state='low'`, `reduce='fp32'`", 8, 2, 4, 1),
)


def paper(collectives: dict[str, Any]) -> str:
    """Return what a step of a 7B model under `hs.shard` stores and sends for each device, from the counted numbers."""
    one_group = [
        row for row in collectives.get("rows", []) if (row["strategy"], row["policy"]) == ("shard", "pure:bf16")
    ]
    if not one_group:
        return NOTHING
    extra = max(row["good"]["number"] for row in one_group)  # of two groups a unit, the second counts as added too
    made: list[list[str]] = []
    for name, stored, gathered, reduced, groups in WAYS:
        for devices, sharing in DEVICES:
            part = (sharing - 1) / sharing * ELEMENTS
            sent = part * (2 * gathered + reduced)
            if devices > sharing:
                sent += 2 * reduced * ELEMENTS / sharing  # gradients, between the copies
            calls = (3 + (devices > sharing)) * (UNITS * groups + 1)
            made.append(
                [
                    name,
                    f"{devices:,}" + ("" if devices == sharing else f", in groups of {sharing:,}"),
                    f"{stored * ELEMENTS / sharing / 1e9:.3g} GB",
                    f"{sent / 1e9:.3g} GB in {calls}",
                    f"{extra}: {8 * TENSORS:,} B",
                    f"{2 * math.ceil(math.log2(devices)) * HOP * 1e6:.0f} us",
                ]
            )
    head = ["policy", "devices", "weights and state of a device", "torch sends, collectives", "`TrainStep` adds"]
    return table([*head, "its latency, if a hop takes 5 us"], made)
