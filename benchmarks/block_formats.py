"""Which simulated formats of 8, 6 and 4 bits train a GPT within the noise of bf16, and what an audit foretells.

    python -m benchmarks.block_formats --json benchmarks/results/block_formats.json

Noise is the spread of bf16 over `SEEDS`: a format is within it if its mean final loss is no further above that of bf16.
Before training, `hs.audit` of the untrained model gives the median error of its linear layers, forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

import halfstep as hs
from benchmarks.markdown import table
from benchmarks.stamp import write
from halfstep.tasks import machine
from halfstep.tasks.gpt import gpt_task

__all__ = ["block_formats_table"]

FORMATS = ("bf16", "mxfp8_e4m3", "nvfp4", "mxfp4")
SEEDS, STEPS, LAST = 3, 40, 10


def trained(dtype: str, seed: int) -> float:
    """Return the mean loss of the last updates."""
    task = gpt_task()
    torch.manual_seed(seed)
    model = task.model()
    step = hs.TrainStep(model, task.optimizer(model), task.loss_fn, policy=hs.Policy.of("mixed", dtype=dtype))
    return mean([step(*task.batches(seed, i)).host().loss for i in range(STEPS)][-LAST:])


def foretold(dtype: str) -> dict[str, float]:
    """Return the median error of linear layers of the untrained model, forward and backward."""
    task = gpt_task()
    torch.manual_seed(0)
    audit = hs.audit(
        task.model(), [task.batches(0, 0)], task.loss_fn, hs.Policy.of("mixed", dtype=dtype), steps=1, reference=False
    )
    roles = {"forward": "activation", "backward": "activation gradient"}
    return {
        name: median([row.error for row in audit.rows if row.op == "linear" and row.role == role])
        for name, role in roles.items()
    }


def block_formats_table(report: Mapping[str, Any]) -> str:
    """Return a row for each format."""
    rows = []
    for row in report["rows"]:
        losses = f"{mean(row['losses']):.3f} ({min(row['losses']):.3f} to {max(row['losses']):.3f})"
        errors = [f"{row['audit'][name]:.2g}" for name in ("forward", "backward")]
        rows.append([f"`{row['format']}`", *errors, losses, f"{row['behind']:+.3f}", "yes" if row["within"] else "no"])
    return table(["format", "audit: error forward", "backward", "final loss", "behind bf16", "within noise"], rows)


def main() -> None:
    """Audit and train every format and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in FORMATS:
        row = {"format": dtype, "audit": foretold(dtype), "losses": [trained(dtype, seed) for seed in range(SEEDS)]}
        base = (rows or [row])[0]["losses"]
        row["behind"] = mean(row["losses"]) - mean(base)
        row["within"] = row["behind"] <= max(base) - min(base)
        rows.append(row)
        print(row, flush=True)
        about = {"command": "make bench-block-formats", "machine": machine(), "steps": STEPS, "seeds": SEEDS}
        write(given.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
