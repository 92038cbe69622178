"""Which block formats train the bundled GPT as bf16 does, and whether an audit said so before.

    python -m benchmarks.block_formats --json benchmarks/results/block_formats.json

Every format trains the task `gpt` from the same weights on the same batches, once for each seed. It trains as bf16 if
the mean of its validation losses is above that of bf16 by less than two standard errors of the difference. Before
any training an audit of the first three steps predicts so: a format without a finding trains.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import torch

import halfstep as hs
from benchmarks.markdown import table
from benchmarks.stamp import write
from halfstep.tasks import machine
from halfstep.tasks.gpt import gpt_task

__all__ = ["block_formats_table"]

SEEDS, STEPS, ERRORS = (0, 1, 2), 200, 2.0
FORMATS = (
    "bf16", "mxfp8_e4m3", "mxfp8_e4m3/mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxfp4-stochastic-hadamard",
    "nvfp4", "nvfp4-stochastic-hadamard",
)  # fmt: skip


def audited(dtype: str) -> dict[str, Any]:
    """Return what an audit says of the first steps in a format."""
    task = gpt_task()
    torch.manual_seed(SEEDS[0])
    model = task.model()
    batches = [task.batches(SEEDS[0], step) for step in range(3)]
    policy = hs.Policy.of("mixed", dtype=dtype)
    audit = hs.audit(model, batches, task.loss_fn, optimizer=task.optimizer(model), policy=policy)
    off = (row.accumulated for row in audit.rows if row.role == "activation")
    largest = max(error for error in off if math.isfinite(error))
    return {"findings": [finding.kind for finding in audit.findings()], "activation_error": largest}


def trained(dtype: str, seed: int) -> float:
    """Return the validation loss after training in a format."""
    task = gpt_task()
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = None if task.scheduler is None else task.scheduler(optimizer, STEPS)
    policy = hs.Policy.of("mixed", dtype=dtype)
    step = hs.TrainStep(model, optimizer, task.loss_fn, policy=policy, scheduler=scheduler)
    for number in range(STEPS):
        step(*task.batches(seed, number))
    model.eval()
    with torch.no_grad():
        return task.measured(model)


def above(losses: list[float], base: list[float]) -> tuple[float, bool]:
    """Return how far the mean loss is above that of `base`, and whether that is within the noise of the seeds."""
    difference = fmean(losses) - fmean(base)
    error = math.sqrt(variance(losses) / len(losses) + variance(base) / len(base))
    return difference, difference < ERRORS * error


def block_formats_table(report: Mapping[str, Any]) -> str:
    """Return a row for each format."""
    rows = []
    for row in report["rows"]:
        said = ", ".join(row["findings"]) or "nothing"
        beside = "" if row["format"] == "bf16" else f"{row['above']:+.4f}"
        numbers = [f"{fmean(row['losses']):.4f}", beside, {True: "yes", False: "no"}[row["trains"]]]
        rows.append([f"`{row['format']}`", *numbers, f"{100 * row['activation_error']:.2g} %", said])
    head = ["format", "validation loss", "above bf16", "trains as bf16", "largest error of an activation"]
    return table([*head, "the audit found"], rows)


def main() -> None:
    """Audit and train every format and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = [{"format": dtype, **audited(dtype)} for dtype in FORMATS]
    for row in rows:
        row["losses"] = [trained(row["format"], seed) for seed in SEEDS]
        row["above"], row["trains"] = above(row["losses"], rows[0]["losses"])
        print(row, flush=True)
    report = {"command": "make bench-block-formats", "machine": machine(), "steps": STEPS, "seeds": len(SEEDS)}
    write(given.json, {**report, "rows": rows})


if __name__ == "__main__":
    main()
