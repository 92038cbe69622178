"""Sketches for TensorBoard: a bar for each exponent, curves for shares, at the step of the record."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import HalfstepError


class Fake:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.curves: dict[str, tuple[int, float]] = {}
        self.histograms: dict[str, dict[str, Any]] = {}
        self.closed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.curves[tag] = (global_step, scalar_value)

    def add_histogram_raw(
        self,
        tag: str,
        min: float,
        max: float,
        num: int,
        sum: float,
        sum_squares: float,
        bucket_limits: list[float],
        bucket_counts: list[int],
        global_step: int,
    ) -> None:
        self.histograms[tag] = {k: v for k, v in locals().items() if k not in ("self", "tag")}

    def close(self) -> None:
        self.closed = True


def test_bars_are_exponents_and_limits_are_where_they_end() -> None:
    fake = Fake()
    sketch = hs.ExponentSketch.of(torch.tensor([0.0, 1.0, 1.5, 6.0, math.inf]))
    hs.SketchWriter(fake).add_sketch("x", sketch, 7)
    assert fake.histograms["x"] == {
        "min": 0.0,
        "max": math.log2(6.0),
        "num": 3,
        "sum": 0.5 + 0.5 + 2.5,
        "sum_squares": 0.25 + 0.25 + 6.25,
        "bucket_limits": [1.0, 2.0, 3.0],
        "bucket_counts": [2, 0, 1],
        "global_step": 7,
    }


def test_no_number_but_zero_is_no_histogram() -> None:
    fake = Fake()
    hs.SketchWriter(fake).add_sketch("x", hs.ExponentSketch.of(torch.zeros(3)), 7)
    assert not fake.histograms


def test_a_record_of_a_monitor_is_written_at_its_step() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    step = hs.TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda m, x: m(x).square().mean(),
        policy=hs.Policy.of("mixed", dtype="fp16"),
    )
    monitor = hs.Monitor(step, every=2, activations=True)
    for _ in range(4):
        step(torch.randn(8, 3))
    fake = Fake()
    writer = hs.SketchWriter(fake)
    (record,) = monitor.poll()
    writer.add(record)
    names = [n for n, _ in model.named_parameters()]
    histograms = {f"{kind}/{name}" for kind in ("gradient", "weight") for name in names}
    assert set(fake.histograms) == histograms | {f"activation/{n}" for n in "012"}
    assert {h["global_step"] for h in fake.histograms.values()} == {4}
    assert fake.histograms["gradient/0.weight"]["num"] == record.parameters[0].gradient.nonzero
    kinds = ("underflow", "subnormal", "zeros", "nonfinite", "headroom", "update_ratio", "swallowed")
    assert set(fake.curves) == {"scale", *(f"{kind}/{name}" for kind in kinds for name in names)}
    assert fake.curves["scale"] == (4, 65536.0)
    writer.close()
    assert fake.closed


@pytest.mark.parametrize("target", [None, 3, object()])
def test_what_is_neither_a_folder_nor_a_writer_is_refused(target: Any) -> None:
    with pytest.raises(HalfstepError, match="takes a folder or a writer with add_scalar and add_histogram_raw"):
        hs.SketchWriter(target)


def test_without_tensorboard_a_folder_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(HalfstepError, match="needs the package tensorboard .*; install it, or pass a writer"):
        hs.SketchWriter(tmp_path / "runs")
    assert not list(tmp_path.iterdir())
