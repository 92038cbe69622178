"""The check behind a speed: what it lets pass, and what it must catch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.cases import LENET, Case, mlp_case
from benchmarks.curves import FACTOR, STEPS, deviation, judge
from benchmarks.loops import amp, fp32, policy

SMALL = mlp_case("small", 64, 128, 10)


def losses(case: Case, make: str) -> list[float]:
    """Return the loss curve of one way to train."""
    torch.manual_seed(0)
    model = case.model()
    loop = {"fp32": fp32, "amp": amp}.get(make)
    run = policy(case, model, make) if loop is None else loop(case, model)
    return [float(run.step(case.batch(number))) for number in range(STEPS)]


def test_deviation_is_a_root_mean_square() -> None:
    assert deviation([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0.0
    assert deviation([4.0, 2.0], [1.0, 6.0]) == pytest.approx(math.sqrt((9 + 16) / 2))


def test_a_curve_that_is_not_finite_is_outside() -> None:
    for bad in (math.nan, math.inf):
        verdict = judge([1.0, bad], [1.0, 0.9], [1.0, 0.8])
        assert verdict.of_spread == math.inf and not verdict.within


def test_only_the_first_steps_are_compared() -> None:
    reference = [0.0] * (STEPS + 1)
    verdict = judge([0.1] * STEPS + [100.0], reference, [0.1] * (STEPS + 1))
    assert verdict.steps == STEPS and verdict.of_spread == pytest.approx(1.0) and verdict.within


def test_the_same_curve_as_fp32_is_within_any_spread() -> None:
    assert judge([1.0, 0.5], [1.0, 0.5], [1.0, 0.5]).within
    assert not judge([1.0, 0.5], [1.0, 0.4], [1.0, 0.4]).within


@pytest.mark.parametrize("preset", ["mixed", "pure"])
def test_presets_stay_within_the_spread(preset: str) -> None:
    verdict = judge(losses(SMALL, preset), losses(SMALL, "fp32"), losses(SMALL, "amp"))
    assert verdict.within and verdict.deviation > 0.0


def test_a_learning_rate_that_is_wrong_by_a_twentieth_is_caught() -> None:
    for case in (SMALL, LENET):
        wrong = losses(replace(case, rate=1.05 * case.rate), "amp")
        verdict = judge(wrong, losses(case, "fp32"), losses(case, "amp"))
        assert verdict.of_spread > FACTOR, case.name
