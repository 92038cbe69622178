"""The committed measurements, read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def load(name: str) -> dict[str, Any]:
    """Return a file of `benchmarks/results`, {} if it is not there."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """What is known; {} for what was not measured.

    Attributes:
        cpu: written by ``python -m benchmarks.run --device cpu``.
        gpu: the same with ``--device cuda``.
        counts: written by ``python -m benchmarks.count --json``: steps on fake CUDA tensors.
        lens: written by ``python -m benchmarks.lens --json``: what instruments cost.
        pages: written by ``python -m benchmarks.pages --json``: page faults.
        serving: written by ``python -m benchmarks.serving --json``: forward passes and decoding.
    """

    cpu: dict[str, Any]
    gpu: dict[str, Any]
    counts: dict[str, Any]
    lens: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, Any] = field(default_factory=dict)
    serving: dict[str, Any] = field(default_factory=dict)


def committed() -> Reports:
    """Return the committed files."""
    names = [part.name for part in fields(Reports)]
    return Reports(**{name: load(f"{name}.json") for name in names})


def row(report: dict[str, Any], case: str, label: str) -> dict[str, Any] | None:
    """Return what was measured of a candidate in a case; None if it was not."""
    found: dict[str, Any] | None = report.get("cases", {}).get(case, {}).get("rows", {}).get(label)
    return found


def bf16_cases(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the cases in bf16, by name."""
    return {name: case for name, case in report.get("cases", {}).items() if case["dtype"] == "bf16"}
