"""A comparison without training: rows with chosen results, times and bytes."""

from __future__ import annotations

from typing import Any

from halfstep.tasks.compare import CandidateRow, Comparison
from halfstep.tasks.measure import difference
from halfstep.timing import Ratio

CONTROL = Ratio(median=1.002, low=0.99, high=1.012, rounds=100)
FAST = Ratio(median=0.7, low=0.69, high=0.71, rounds=100)
SAME = Ratio(median=1.008, low=1.005, high=1.01, rounds=100)
SLOW = Ratio(median=1.4, low=1.38, high=1.42, rounds=100)


def row(
    label: str, metrics: tuple[float, ...], to_fp32: Ratio | None, to_amp: Ratio | None, **changes: Any
) -> CandidateRow:
    """Return a row whose fp32 ended at 97.0 with every seed, with a margin of 1."""
    fields: dict[str, Any] = {
        "label": label,
        "policy": "",
        "notes": ("fp16 is emulated",) if "fp16" in label else (),
        "metrics": metrics,
        "difference": difference(metrics, (97.0,) * len(metrics), 1.0, higher=True),
        "milliseconds": 12.3456,
        "to_fp32": to_fp32,
        "to_amp": to_amp,
        "state_bytes": 2_500_000,
        "saved_bytes": 1_000,
        "skipped": tuple(range(len(metrics))),
        "skipped_steps": tuple(tuple(range(seed)) for seed in range(len(metrics))),
        "scale": (65536.0,) * len(metrics),
        "losses": (2.0, 1.0),
    }
    return CandidateRow(**{**fields, **changes})


def comparison(seeds: int, *more: CandidateRow, **changes: Any) -> Comparison:
    """Return fp32, torch.amp and `more`; without more a policy that is worse and faster."""
    fields: dict[str, Any] = {
        "task": "toy",
        "about": "a toy",
        "metric": "accuracy, %",
        "higher_is_better": True,
        "margin": 1.0,
        "device": "cpu",
        "steps": 100,
        "seeds": tuple(range(seeds)),
        "loss_steps": (25.5, 75.5),
        "control": CONTROL,
        "repeatable": True,
        "rows": (
            row("fp32", (97.0,) * seeds, None, SAME),
            row("torch.amp bf16", (97.0,) * seeds, SAME, None),
            *(more or (row("O2 fp16", (90.0,) * seeds, FAST, FAST),)),
        ),
    }
    return Comparison(**{**fields, **changes})
