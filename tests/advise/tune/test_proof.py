"""The proof: given trainings, and real ones of microseconds."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.advise.tune.lab import revived
from halfstep.advise.tune.proof import EARLY, FIRST, LEVEL, MOST_SEEDS, PATIENCE, Proof, Run, prove, seeds_needed
from halfstep.tasks.candidates import Candidate
from halfstep.tasks.measure import ENOUGH_SEEDS
from tests.tasks.small import loss_fn, small_task

POLICY = hs.Policy.of("mixed", dtype="bf16")
MIXED = Candidate(label="mixed bf16", dtype="bf16", policy=POLICY)
TRIALS = 150
STEPS, START, MARGIN = 4, 10.0, 0.5  # the small task's margin


def runs(fp32: Sequence[float], own: Sequence[float], *, measure: str = "metric", seconds: float = 1.0) -> list[Run]:
    """Return trainings that ended with these values, seed by seed."""

    def run(policy: str, seed: int, value: float) -> Run:
        return Run(
            policy=policy, compile=False, measure=measure, steps=STEPS, seed=seed, start=START, value=value,
            losses=(START, 5.0, 3.0, value), skipped=0, seconds=seconds,
        )  # fmt: skip

    sides = (("", fp32), (POLICY.to_toml(), own))
    return [run(policy, seed, value) for policy, values in sides for seed, value in enumerate(values)]


def given(fp32: Sequence[float], own: Sequence[float], *, measure: str = "metric", **options: Any) -> Proof:
    """Return the proof of trainings that ended with these values, without time for others."""
    task = options.pop("task", small_task())
    return prove(task, MIXED, steps=STEPS, runs=runs(fp32, own, measure=measure), **{"seconds": 0.0, **options})


def around(mean: float, spread: float, count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(mean, spread) for _ in range(count)]


# ------------------------------------------------------------------ verdicts


def test_runs_that_end_alike_are_equivalent_and_the_sentence_has_the_numbers() -> None:
    fp32 = around(1.0, 1.0, 5)
    found = given(fp32, [x + 0.01 * (-1) ** i for i, x in enumerate(fp32)])
    assert (found.verdict, found.holds, found.seeds_more) == ("equivalent", True, 0)
    assert found.margin == MARGIN and found.margin_from == "the task's own margin"
    assert found.reason.startswith("loss minus fp32's: +0.00333, 99 % interval [-0.0") and "margin 0.5" in found.reason
    assert len(found.values) == FIRST
    asked = given(
        fp32, [x + 0.01 * (-1) ** i for i, x in enumerate(fp32)], seeds=5
    )  # is one look, with all of the level
    assert asked.reason.startswith("loss minus fp32's: +0.002, 90 % interval [-0.0") and len(asked.values) == 5


@pytest.mark.parametrize(("shift", "verdict"), [(2.0, "worse"), (-2.0, "better")])
def test_runs_outside_the_margin(shift: float, verdict: str) -> None:
    fp32 = around(1.0, 1.0, 5)
    found = given(fp32, [x + shift + 0.01 * (-1) ** i for i, x in enumerate(fp32)])
    assert found.verdict == verdict and found.holds == (verdict == "better")
    higher = given(fp32, [x - shift for x in fp32], task=small_task(higher_is_better=True), measure="metric")
    assert higher.verdict == "undecided"  # with that sign fp32 has lost, not gained: no reference


def test_the_spread_of_the_first_pairs_decides_how_many_seeds_there_are() -> None:
    """The first five alone would pass: looking for equivalence before the planned number would be a second test."""
    fp32, noise = [1.0] * 40, (0.4, -0.4, 0.35, -0.35, 0.0)
    own = [1.0 + x for x in noise] * 8
    from_five = given(fp32[:5], own[:5])
    found = from_five.difference
    assert found is not None and found.verdict == "within the margin" and from_five.verdict == "undecided"
    needed = seeds_needed(torch.tensor(noise).std().item(), MARGIN, level=LEVEL - EARLY)
    assert from_five.seeds_more == needed - 5 > 0 and "91 % interval" in from_five.reason
    assert f"a verdict needs {from_five.seeds_more} more seeds" in from_five.reason
    enough = given(fp32, own)
    assert enough.verdict == "equivalent" and len(enough.values) == 5 + from_five.seeds_more


def test_an_undecided_result_asks_for_the_seeds_that_would_decide_and_takes_them_when_told() -> None:
    own = [1.45 + x for x in (0.1, -0.1, 0.05, -0.05, 0.0)] * 20
    found = given([1.0] * 100, own)
    assert found.verdict == "undecided" and len(found.values) == ENOUGH_SEEDS and found.seeds_more > 0
    again = given([1.0] * 100, own, seeds=ENOUGH_SEEDS + found.seeds_more)
    assert again.verdict == "equivalent" and len(again.values) == ENOUGH_SEEDS + found.seeds_more


def test_a_run_that_is_not_finite_ends_it() -> None:
    found = given([1.0, 1.1, 0.9, 1.2, 1.0], [1.0, math.nan])
    assert found.verdict == "diverged" and "(seed 1)" in found.reason and not found.holds


# ------------------------------------------------------------------ errors of the test itself


def passes(shift: float, spread: float, times: int = TRIALS) -> float:
    """Return how often a policy passes whose true difference from fp32 is `shift`."""
    count = 60
    won = 0
    for trial in range(times):
        fp32 = around(1.0, 1.0, count, seed=trial)
        own = [a + b for a, b in zip(fp32, around(shift, spread, count, seed=10_000 + trial), strict=True)]
        won += given(fp32, own).verdict == "equivalent"
    return won / times


@pytest.mark.parametrize("spread", [0.2, 0.8])
def test_a_policy_at_the_margin_passes_in_a_twentieth_of_the_cases(spread: float) -> None:
    assert passes(MARGIN, spread) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)


def test_a_first_look_that_spends_more_than_its_share_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.advise.tune.proof.EARLY", 0.2)
    monkeypatch.setattr("halfstep.advise.tune.proof.LEVEL", 0.25)
    assert passes(MARGIN, 0.2) > 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)


def test_a_policy_as_good_as_fp32_passes_as_often_as_planned() -> None:
    assert passes(0.0, 0.6) >= 0.7  # 0.8 were the spread known; five pairs estimate it


def test_seeds_needed() -> None:
    assert seeds_needed(0.0, 1.0) == seeds_needed(0.1, 1.0) == ENOUGH_SEEDS
    counts = [seeds_needed(spread, 1.0) for spread in (0.5, 1.0, 2.0, 4.0)]
    assert counts == sorted(counts) and counts[1] == pytest.approx((1.645 + 1.282) ** 2, abs=2)
    assert counts[3] == pytest.approx(16 * (1.645 + 1.282) ** 2, abs=2)
    assert seeds_needed(1.0, 1.0, 1.0) == seeds_needed(1.0, 1.0, -1.0) == MOST_SEEDS
    assert seeds_needed(1.0, 1.0, 3.0) == seeds_needed(1.0, 2.0)  # beyond the margin "worse" has to be shown


# ------------------------------------------------------------------ margins and references


def test_margins_are_from_the_task_from_max_loss_rise_or_from_the_spread_of_fp32() -> None:
    fp32 = [1.0, 1.1, 0.9, 1.05, 0.95]
    by_loss = given(fp32, fp32, measure="loss", max_loss_rise=0.02)
    assert by_loss.margin == pytest.approx(0.02) and "max_loss_rise: 0.02" in by_loss.margin_from
    assert by_loss.measure == "training loss"
    without = given(fp32, fp32, measure="loss", task=small_task(metric=None, margin=None))
    assert without.margin == pytest.approx(torch.tensor(fp32).std().item()) and "5 seeds" in without.margin_from


def test_the_margin_is_that_of_the_first_seeds_of_fp32_alone() -> None:
    fp32 = [1.0, 1.1, 0.9, 1.05, 0.95, *([5.0] * 95)]
    task = small_task(relative_margin=True, margin=0.5)
    assert given(fp32, [x + 0.6 * (-1) ** i for i, x in enumerate(fp32)], task=task).margin == pytest.approx(0.5)


def test_a_task_on_which_fp32_learns_too_little_decides_nothing() -> None:
    fp32 = [START - 3 * MARGIN] * 5
    found = given(fp32, fp32)
    assert (found.verdict, found.seeds_more) == ("undecided", -1) and "fp32 gains 1.5 in 4 steps" in found.reason


def test_fp32_that_ends_alike_with_every_seed_gives_no_margin() -> None:
    found = given([1.0] * 5, [1.0] * 5, measure="loss", task=small_task(metric=None, margin=None))
    assert found.verdict == "undecided" and "give max_loss_rise" in found.reason


def test_fp32_that_is_not_finite_is_no_reference() -> None:
    found = given([1.0, math.nan], [])
    assert found.verdict == "undecided" and found.seeds_more == -1 and "fp32 itself" in found.reason


# ------------------------------------------------------------------ time


@pytest.mark.parametrize(
    ("fp32", "own", "more", "words"),
    [
        (0, 0, 5, "after 0 trainings of fp32"),
        (2, 0, 5, "after 2 trainings of fp32"),
        (3, 0, 5, "before the policy was trained"),
        (5, 0, 5, "before the policy was trained"),
        (5, 1, 4, "after one pair"),
        (5, 3, 2, "91 % interval"),
    ],
)
def test_time_that_was_too_short_is_said_with_what_is_missing(fp32: int, own: int, more: int, words: str) -> None:
    ends = around(1.0, 0.1, 5)
    found = given(ends[:fp32], [x + 0.2 * i for i, x in enumerate(ends[:own])])
    assert (found.verdict, found.seeds_more) == ("undecided", more) and words in found.reason
    assert f"a verdict needs {more} more seeds" in found.reason
    if fp32:
        assert found.seconds_more == pytest.approx(more + (5 - fp32))


def test_a_training_that_would_not_end_in_time_is_not_begun() -> None:
    ticks = iter(range(1000))
    made: list[Run] = []
    found = prove(
        small_task(margin=0.005), MIXED, steps=8, seconds=12.0, on_run=made.append, clock=lambda: float(next(ticks))
    )
    assert found.verdict == "undecided" and 0 < len(made) < 6 and found.seeds_more > 0


# ------------------------------------------------------------------ real trainings


def test_real_trainings_go_on_from_their_record_with_the_same_result() -> None:
    task, made = small_task(margin=0.005), list[Run]()  # the loss falls from about 0.05
    before = torch.random.get_rng_state()
    whole = prove(task, MIXED, steps=12, on_run=made.append)
    assert torch.equal(before, torch.random.get_rng_state())
    assert whole.verdict == "equivalent" and len(made) == 6
    kept = [revived(Run, json.loads(json.dumps(dataclasses.asdict(run)))) for run in made[:4]]
    assert kept[3].start != kept[3].start  # nan came back: the metric before training is fp32's alone
    again: list[Run] = []
    assert prove(task, MIXED, steps=12, runs=kept, on_run=again.append) == whole and len(again) == 2


def test_weights_that_round_every_update_away_are_worse() -> None:
    stuck = hs.Policy.of("pure", dtype="bf16", master="none")
    task = small_task(
        margin=0.0015, model=lambda: nn.Sequential(nn.Linear(8, 1)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=4e-4),
    )  # fmt: skip
    found = prove(task, Candidate(label="stuck", dtype="bf16", policy=stuck), steps=60)
    assert found.verdict == "worse", found.reason


def test_a_candidate_that_raises_or_never_has_a_finite_loss_is_a_result_and_fp32_s_error_is_not() -> None:
    def raising(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        if out.dtype is torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'\nsecond line")
        return torch.nn.functional.mse_loss(out, y)

    def infinite(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        low = model(x).dtype is torch.bfloat16
        return loss_fn(model, x, y) * (math.inf if low else 1.0)

    task = small_task(margin=0.005)
    found = prove(dataclasses.replace(task, loss_fn=raising), MIXED, steps=12)
    assert found.verdict == "diverged" and "not implemented for 'BFloat16' (seed 0)" in found.reason
    found = prove(dataclasses.replace(task, loss_fn=infinite), MIXED, steps=PATIENCE + 30)
    assert found.verdict == "diverged" and f"the {PATIENCE} steps up to step {PATIENCE} is not finite" in found.reason

    def broken(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this task is broken")

    with pytest.raises(RuntimeError, match="this task is broken"):
        prove(dataclasses.replace(task, loss_fn=broken), MIXED, steps=4)
