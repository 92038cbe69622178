from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.tasks.candidates import candidates
from halfstep.tasks.compare import CURVE_POINTS, Comparison, check, compare, thinned
from halfstep.tasks.loops import Training
from halfstep.timing import WARM_UP
from tests.tasks.small import batches, loss_fn, small_task


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(small_task(), candidates(["mixed", "O2:fp16"], "cpu"), steps=25, seeds=2)


def test_a_row_for_every_candidate(found: Comparison) -> None:
    assert [r.label for r in found.rows] == ["fp32", "torch.amp bf16", "mixed bf16", "O2 fp16"]
    fp32, amp, mixed, o2 = found.rows
    assert fp32.to_fp32 is None and amp.to_amp is None
    assert mixed.to_fp32 is not None and mixed.to_fp32.rounds == 2 * (25 - WARM_UP)
    assert all(len(r.metrics) == len(r.skipped) == len(r.scale) == 2 for r in found.rows)
    assert fp32.difference.mean == 0.0 and fp32.policy == "" and hs.Policy.from_toml(mixed.policy).dtype == "bf16"
    assert o2.scale == (65536.0, 65536.0) and mixed.scale == (1.0, 1.0)
    assert mixed.saved_bytes < fp32.saved_bytes and o2.saved_bytes < fp32.saved_bytes
    assert (found.task, found.steps, found.seeds, found.margin) == ("small", 25, (0, 1), 0.5)


def test_identical_programs_give_identical_results_with_dropout_too(found: Comparison) -> None:
    assert found.repeatable and found.control is not None and found.control.rounds == 2 * (25 - WARM_UP)


def test_training_happened_and_policies_follow_fp32(found: Comparison) -> None:
    start = compare(small_task(), candidates([], "cpu"), steps=1, seeds=2)
    for row in found.rows:
        assert max(row.metrics) < min(start.rows[0].metrics)
        assert abs(row.difference.mean) < 0.1 * start.rows[0].metrics[0]
    assert start.control is None and start.rows[0].to_amp is None  # one step is all warm-up


def test_everybody_gets_the_same_batches_the_same_number_of_times() -> None:
    seen: Counter[float] = Counter()
    ticks: list[tuple[int, int]] = []

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen[float(x.double().sum())] += 1
        return loss_fn(model, x, y)

    def on_step(training: Training, label: str, number: int, seconds: float) -> None:
        assert label in training.loops and seconds > 0
        ticks.append((training.seed, number))

    compared = candidates(["mixed"], "cpu")
    compare(small_task(loss_fn=watched), compared, steps=6, seeds=2, on_step=on_step)
    runs = len(compared) + 1  # torch.amp twice
    probed = len(compared)  # two more steps of seed 0 for the count of bytes
    assert sorted(seen.values()) == [runs] * 10 + [runs + probed] * 2
    assert Counter(ticks) == {(seed, number): runs for seed in (0, 1) for number in range(6)}


def test_everybody_starts_from_the_same_weights() -> None:
    starts: list[Tensor] = []

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        starts.append(next(model.parameters()).detach().float().clone())
        return loss_fn(model, x, y)

    compare(small_task(loss_fn=watched), candidates(["torch"], "cpu"), steps=1, seeds=1)
    assert len(starts) == 3 * 2 + 4  # two probing steps each, then one step each and torch.amp's twin
    assert all(torch.equal(starts[0], s) for s in starts[6:])


def test_the_state_of_the_random_generator_is_the_same_for_all() -> None:
    """Dropout draws; were it drawn from one running generator, the order of the round would decide the result."""
    draws: list[float] = []

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        draws.append(float(torch.rand(())))
        return loss_fn(model, x, y)

    compared = candidates([], "cpu")
    compare(small_task(loss_fn=watched), compared, steps=4, seeds=1)
    counts = Counter(draws[2 * len(compared) :])
    assert set(counts.values()) == {len(compared) + 1} and len(counts) == 4


def test_the_curve_of_a_row_is_the_mean_loss_over_the_seeds() -> None:
    seen: dict[bool, list[float]] = {False: [], True: []}

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(model, x, y)
        seen[torch.is_autocast_enabled("cpu")].append(float(loss.detach()))
        return loss

    found = compare(small_task(loss_fn=watched), candidates([], "cpu"), steps=6, seeds=2)
    assert found.loss_steps == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    fp32 = seen[False][2:]  # two steps of the count of bytes come first
    means = [(a + b) / 2 for a, b in zip(fp32[:6], fp32[6:], strict=True)]
    assert found.rows[0].losses == tuple(float(f"{mean:.6g}") for mean in means)
    amp = seen[True][2::2]  # torch.amp runs twice, with equal losses
    assert found.rows[1].losses == pytest.approx([(a + b) / 2 for a, b in zip(amp[:6], amp[6:], strict=True)], rel=1e-5)


def test_a_long_curve_is_thinned_to_means_of_consecutive_steps() -> None:
    steps = thinned(range(1, 951))
    assert len(steps) == 190 <= CURVE_POINTS and steps[:2] == (3.0, 8.0) and steps[-1] == 948.0
    assert thinned(range(1, 202))[-2:] == (199.5, 201.0)  # the last mean is of what is left
    assert thinned([1 / 3]) == (0.333333,)
    gap = thinned([1.0, float("inf"), 2.0, float("-inf"), float("nan")])
    assert str(gap) == "(1.0, nan, 2.0, nan, nan)"
    assert str(thinned([*[1.0] * 200, float("-inf"), float("inf")])[-2:]) == "(1.0, nan)"


def test_which_steps_were_skipped_is_known() -> None:
    def exploding(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model, x, y) * (float("inf") if float(x.sum()) in bad else 1.0)

    bad = {float(batches(seed, step)[0].sum()) for seed, step in ((0, 3), (1, 2), (1, 5))}
    found = compare(small_task(loss_fn=exploding), candidates(["mixed:fp16"], "cpu"), steps=7, seeds=2)
    mixed = found.rows[2]
    assert mixed.skipped_steps == ((3,), (2, 5)) and mixed.skipped == (1, 2)
    assert [step for step, loss in enumerate(mixed.losses) if loss != loss] == [2, 3, 5]


def test_a_relative_margin_is_a_share_of_fp32s_metric() -> None:
    found = compare(small_task(margin=0.01, relative_margin=True), candidates([], "cpu"), steps=3, seeds=2)
    assert found.margin == pytest.approx(0.01 * sum(found.rows[0].metrics) / 2)


def test_a_run_that_diverges_is_called_that() -> None:
    def metric(model: nn.Module) -> float:
        return float("nan") if torch.is_autocast_enabled("cpu") else 1.0

    found = compare(small_task(metric=metric), candidates([], "cpu"), steps=1, seeds=1)
    assert found.rows[1].difference.verdict == "diverged"


def test_a_policy_that_cannot_run_says_so_before_anything_is_trained(tmp_path: Path) -> None:
    steps: list[Any] = []
    task = small_task(loss_fn=lambda *a: steps.append(a))
    check(task, candidates(["mixed", "O2"], "cpu"), "cpu")
    (tmp_path / "e4m3.toml").write_text('preset = "O2"\ndtype = "e4m3"')
    with pytest.raises(NotImplementedError, match="parameters cannot be held in 'e4m3'"):
        check(task, candidates([str(tmp_path / "e4m3.toml")], "cpu"), "cpu")
    assert steps == []
