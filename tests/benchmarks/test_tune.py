"""The benchmark of `hs.tune`: its goals from given numbers, its tasks, and that presets lose on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tune as bench
from benchmarks.tune_tasks import TASKS
from halfstep.advise.tune.calibration import gradient_error, gradients
from halfstep.policy import Policy
from halfstep.timing import Ratio


def ratio(median: float, spread: float = 0.01) -> Ratio:
    return Ratio(median=median, low=median - spread, high=median + spread, rounds=50)


def row(label: str, time: float, verdict: str, tuned: float = 0.5) -> bench.Row:
    return bench.Row(label=label, policy=label, milliseconds=time, to_fp32=ratio(time), tuned=ratio(tuned / time),
                     verdict=verdict, reason="")  # fmt: skip


def made(*presets: bench.Row, verdict: str = "equivalent", tuned: float = 0.5) -> dict[str, Any]:
    rows = [row("fp32", 1.0, "equivalent", tuned), row(bench.TUNED, tuned, verdict, tuned), *presets]
    control = {"median": 1.0, "low": 0.99, "high": 1.01, "rounds": 50}
    return {"task": "t", "control": control, **bench.summary(rows)}


def test_the_figure_is_beside_the_fastest_preset_that_was_not_shown_to_be_worse() -> None:
    found = made(row("mixed", 0.6, "worse"), row("O2", 0.7, "undecided"), row("torch", 0.8, "equivalent"))
    assert (found["fastest_equivalent"], found["fastest_not_worse"]) == ("torch", "O2")
    assert found["ratio"]["median"] == pytest.approx(0.5 / 0.7)
    assert bench.goals([found])["five_percent_faster"] == ["t"]


@pytest.mark.parametrize(
    ("tuned", "verdict", "no_slower", "faster"),
    [(0.7, "equivalent", True, True), (0.79, "equivalent", True, False), (0.9, "equivalent", False, False),
     (0.7, "undecided", False, False), (0.7, "worse", False, False), (0.7, "better", True, True)],
)  # fmt: skip
def test_goals(tuned: float, verdict: str, no_slower: bool, faster: bool) -> None:
    preset = row("torch", 0.8, "equivalent", tuned)
    found = bench.goals([made(preset, verdict=verdict, tuned=tuned), {"task": "broken", "error": "why"}])
    assert found["tasks"] == 2
    assert (found["no_slower"], found["five_percent_faster"]) == (["t"] * no_slower, ["t"] * faster)


@pytest.mark.parametrize("name", ["distances", "stream", "weights", "norms"])
def test_tasks_give_the_same_batches_again_and_train(name: str) -> None:
    task = TASKS[name]()
    batch = task.batches(3, 4)
    assert all(torch.equal(a, b) for a, b in zip(batch, task.batches(3, 4), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(batch, task.batches(4, 4), strict=True))
    torch.manual_seed(0)
    model = task.model()
    with torch.no_grad():
        assert task.margin is not None and math.isfinite(task.measured(model))
        assert task.loss_fn(model, *batch).isfinite()


@pytest.mark.parametrize(
    ("name", "loses", "trains"),
    [
        ("distances", "mixed", Policy.of("mixed", dtype="bf16").with_ops(fp32=["matmul"])),
        ("weights", "pure", Policy.of("pure", dtype="bf16", inputs="keep")),
        ("stream", "O2", Policy.of("torch", dtype="bf16")),
    ],
)
def test_a_preset_loses_what_an_exception_keeps(name: str, loses: str, trains: Policy) -> None:
    """On the initial weights already: the error of the gradients, from 0 to 1."""
    task = TASKS[name]()
    torch.manual_seed(0)
    model, batch = task.model(), task.batches(0, 0)
    wide = gradients(task, model, batch, None)
    assert gradient_error(task, model, batch, Policy.of(loses, dtype="bf16"), wide) > 0.08
    assert gradient_error(task, model, batch, trains, wide) < 0.06


def test_a_finished_task_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "norms.json").write_text('{"task": "norms", "error": "kept", "seconds": {"all": 6.0}}')
    monkeypatch.setattr(bench, "tune", None)  # measuring would call it
    found = bench.report(tmp_path, ["norms"], 1.0)
    assert found["tasks"][0]["error"] == "kept" and found["minutes"] == 0.1 and found["goals"]["tasks"] == 1
