"""Rounds pair what belongs together."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.candidates import LOOPS
from benchmarks.cases import AGAIN, AMP, BATCHES, CASES, mlp_case
from benchmarks.loops import Absent, policy
from benchmarks.measure import QUICK, Effort, measure, rounds_for, started
from benchmarks.turns import Track, in_turns, ratio

SMALL = mlp_case("small", 32, 64, 10)


def test_every_candidate_steps_once_a_round_on_the_same_batch_in_a_shuffled_order() -> None:
    called: list[tuple[str, int]] = []

    def step(name: str, batch: tuple[Tensor, ...]) -> Tensor:
        assert not gc.isenabled()
        called.append((name, int(batch[0])))
        return batch[0].float()

    names = ("a", "b", "c")
    tracks = {name: Track() for name in names}
    steps = {name: lambda batch, name=name: step(name, batch) for name in names}
    in_turns(steps, lambda n: (torch.tensor(n),), tracks, "cpu", rounds=range(5, 25), rare={"c": 2})
    assert gc.isenabled()
    for number in range(5, 25):
        assert sorted(name for name, n in called if n == number) == ["a", "b", *(["c"] if number < 7 else [])]
    assert len({tuple(name for name, n in called if n == number) for number in range(7, 25)}) == 2
    assert list(tracks["c"].seconds) == [5, 6] and [float(x) for x in tracks["c"].losses] == [5.0, 6.0]


def test_ratios_pair_times_of_the_same_round() -> None:
    slow, fast = Track(seconds={1: 2.0, 2: 40.0, 3: 1.0}), Track(seconds={1: 1.0, 2: 20.0})
    assert ratio(slow, fast).median == 2.0 and ratio(slow, fast).rounds == 2
    assert ratio(slow, fast, plus=1.0).median == (2 / 2 + 40 / 21) / 2


def test_rounds_fill_the_seconds_of_a_case_within_its_bounds() -> None:
    case = replace(SMALL, seconds=10.0, rounds=300)
    full = Effort(rounds=47, share=1.0, stages=1)
    assert rounds_for(case, {"a": 0.05, "b": 0.05}, full) == 100
    assert rounds_for(case, {"a": 0.001}, full) == 300
    assert rounds_for(case, {"a": 5.0}, full) == 47
    assert rounds_for(case, {"a": 0.001}, QUICK) == QUICK.rounds


def test_all_candidates_start_from_the_same_weights() -> None:
    here = started(replace(SMALL, cpu=("fp32", AMP, AGAIN)), ("fp32", AMP, AGAIN), "cpu")
    first = {label: float(track.losses[0]) for label, track in here.tracks.items()}
    assert first[AMP] == first[AGAIN] and abs(first["fp32"] - first[AMP]) < 0.01


def test_every_label_of_every_case_has_a_loop_and_every_case_a_baseline_twice() -> None:
    for case in CASES.values():
        for device in ("cpu", "cuda"):
            labels = case.candidates(device)
            assert set(labels) <= set(LOOPS) and len(set(labels)) == len(labels)
            if labels:
                assert {"fp32", AMP, "mixed", "pure"} <= set(labels)
                assert ("fp32 again" if case.dtype == "fp16" and device == "cpu" else AGAIN) in labels
        assert all(torch.equal(a, b) for a, b in zip(case.batch(1), case.batch(1 + BATCHES), strict=True))


def test_a_measured_case_says_everything() -> None:
    case = replace(SMALL, cpu=("fp32", AMP, AGAIN, "mixed", "pure"))
    found = measure(case, "cpu", QUICK, 1e10)
    assert set(found["rows"]) == {"fp32", AMP, "mixed", "pure"} and found["rounds"] == QUICK.rounds
    for label, row in found["rows"].items():
        assert row["ms"] > 0 and row["counts"]["state_bytes"] > 0 and row["curve"]["steps"] == 3 + QUICK.rounds
        assert ("to_amp" in row) == (label != AMP)
    assert set(found["stages"]) == {AMP, "mixed", "pure"} and found["limit"]["tail_ms"] > 0
    assert found["stages"]["pure"]["weight_casts"] == 0 < found["stages"][AMP]["weight_casts"]


def test_a_candidate_that_cannot_run_here_is_absent_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # as if it were not installed
    here = started(SMALL, ("fp32", "accelerate"), "cpu")
    assert set(here.runs) == {"fp32"}
    assert "pip install 'halfstep[bench]'" in here.absent["accelerate"]


def test_an_option_that_train_step_lacks_is_an_absence_and_not_a_silent_default() -> None:
    with pytest.raises(Absent, match="TrainStep has no warp_speed="):
        policy(SMALL, SMALL.model(), "mixed", warp_speed=True)


def test_what_halfstep_raises_is_an_error_and_no_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("halfstep.TrainStep", broken)
    with pytest.raises(ZeroDivisionError):
        started(SMALL, ("mixed",), "cpu")
