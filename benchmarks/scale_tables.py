"""Tables of several processes beside one, from the JSON files of `benchmarks.scale`."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.markdown import table

__all__ = ["scale_blocks"]

NOTHING = "Not measured here."
Rows = list[dict[str, Any]]


def scale_blocks(parity: dict[str, Any], collectives: dict[str, Any]) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    return {
        "parity summary": parity_summary(parity),
        "scale on paper": paper(collectives),
    }


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
