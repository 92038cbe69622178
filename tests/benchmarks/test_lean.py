"""The benchmark of `lean`: it sees lost updates, and its report is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import lean
from benchmarks.lean_tables import lean_blocks
from benchmarks.reports import load
from halfstep.tasks import load_task

STEPS = 6


@pytest.fixture(scope="module")
def start() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(load_task("gpt").model().state_dict())


def way(label: str, rate: str, start: dict[str, Tensor]) -> Tensor:
    """Return where weights end after some steps of `tune`."""
    task = replace(lean.program(f"tune {rate}", lambda: start), metric=lambda model: 0.0)
    loop, run = lean.train(task, lean.CANDIDATES[label], 0, STEPS)
    assert run.steps == STEPS and run.program == f"tune {rate}"
    assert label != "lean" or run.bytes == pytest.approx(6.0, abs=0.1)
    return lean.flat(loop.model.state_dict())


def test_updates_below_an_ulp_add_up_under_lean_and_are_lost_to_nearest(start: dict[str, Tensor]) -> None:
    rate = "1e-6"
    begun, wide = lean.flat(start), way("fp32", rate, start)
    along = {label: lean.ways(begun, wide, way(label, rate, start))["along"] for label in ("lean", "to nearest")}
    assert abs(along["lean"] - 1) < 0.1
    assert along["to nearest"] < 0.3


def test_ways_of_weights() -> None:
    start, fp32 = torch.zeros(2), torch.tensor([2.0, 0.0])
    assert lean.ways(start, fp32, fp32) == {"distance": 0.0, "along": 1.0}
    assert lean.ways(start, fp32, torch.tensor([1.0, 1.0])) == pytest.approx({"distance": 0.5**0.5, "along": 0.5})


def test_a_run_that_is_known_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "PLAN", {"resnet": ("fp32", "lean")})
    monkeypatch.setattr(lean, "SLOW", {})
    monkeypatch.setattr(lean, "SEEDS", {"resnet": 2})
    monkeypatch.setattr(lean, "STEPS", 2)
    first = lean.runs(tmp_path)
    monkeypatch.setattr(lean, "train", None)
    assert lean.runs(tmp_path) == first and [run.seed for run in first] == [0, 0, 1, 1]


def test_the_committed_report_has_every_run() -> None:
    report = load("lean.json")
    if not report:
        pytest.skip("not measured yet")
    programs = report["programs"]
    assert programs.keys() == lean.PLAN.keys()
    for name, labels in lean.PLAN.items():
        assert programs[name]["steps"] == (lean.TUNE_STEPS if name.startswith("tune") else lean.STEPS)
        found = {row["label"]: len(row["metrics"]) for row in programs[name]["rows"]}
        slow = {lean.AO: lean.SLOW[name]} if name in lean.SLOW else {}
        assert found == dict.fromkeys(labels, lean.SEEDS[name]) | slow
    assert lean_blocks({})["lean training"] == "Not measured here."
