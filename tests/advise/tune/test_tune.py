"""hs.tune on a task with exact times: what it finds, writes and reads back; wrong arguments; interruption."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.advise.tune import TuneError, Tuning
from halfstep.advise.tune.tuner import low_formats, weights_of
from halfstep.errors import TaskError
from tests.advise.tune.clocks import WorkClock, loss_fn, work_task
from tests.tasks.small import small_task

LONG = 1e5  # minutes of a clock that only work moves
SHORT = 14.0  # likewise: enough for presets and the proof, not for changes


def tuned(clock: WorkClock, *, changes: dict[str, Any] | None = None, **options: Any) -> Tuning:
    fields = {"excerpt_steps": 20, **(changes or {})}
    return hs.tune(work_task(clock, **fields), device="cpu", compile=False, clock=clock,
                   **{"minutes": SHORT, "dtypes": ["bf16"], "max_loss_rise": 0.5, **options})  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuning, Path]:
    path = tmp_path_factory.mktemp("tune") / "state.json"
    return tuned(WorkClock(), resume=path), path


def test_where_low_products_take_half_the_time_a_low_policy_is_found_and_proven(found: tuple[Tuning, Path]) -> None:
    tuning, _ = found
    assert tuning.policy.dtype == "bf16" and tuning.chosen.time is not None
    assert tuning.chosen.time.median == 0.5 and not tuning.interrupted
    assert not tuning.finished and "too short for changes that save" in tuning.notes[0]
    assert tuning.proof is not None and tuning.proof.holds and tuning.chosen.verdict == "chosen"
    assert tuning.tried[0].label == "fp32" and tuning.chosen in tuning.tried
    assert 0.0 < tuning.chosen.error < 0.1 and abs(tuning.chosen.loss_rise) < 0.5


def test_its_toml_reads_back_and_says_why(found: tuple[Tuning, Path], tmp_path: Path) -> None:
    tuning, _ = found
    path = tmp_path / "policy.toml"
    path.write_text(tuning.to_toml(), encoding="utf-8")
    assert hs.Policy.of(path) == hs.Policy.of(str(path)) == tuning.policy
    text = path.read_text(encoding="utf-8")
    assert "# chosen: the cheapest of those" in text and "equivalent: " in text
    assert "# time: 0.500 (0.500 to 0.500) of fp32's, 1e+03 ms a step" in text
    assert "# tried and not chosen" in text and "#   O0: 1.000; 0; within" in text
    assert "# machine: " in text and max(map(len, text.splitlines())) <= 112


def test_its_record_is_json(found: tuple[Tuning, Path]) -> None:
    tuning, _ = found
    record = json.loads(json.dumps(tuning.record()))
    assert hs.Policy.from_toml(record["chosen"]["policy"]) == tuning.policy
    assert record["tried"][0]["label"] == "fp32" and record["chosen"]["time"]["median"] == 0.5


def test_resumed_it_measures_nothing_again_and_finds_the_same(found: tuple[Tuning, Path], tmp_path: Path) -> None:
    tuning, state = found
    path = tmp_path / "state.json"
    path.write_bytes(state.read_bytes())
    clock = WorkClock()
    again = tuned(clock, resume=path, minutes=0.01)
    assert clock.now == 0.0 and again.record() == tuning.record()


def test_an_interrupted_search_keeps_what_it_has_and_goes_on(found: tuple[Tuning, Path], tmp_path: Path) -> None:
    tuning, _ = found
    path = tmp_path / "state.json"
    clock = WorkClock()
    seen: list[str] = []

    def stop(progress: Any) -> None:
        seen.append(progress.phase)
        if progress.phase.startswith("equivalence"):
            raise KeyboardInterrupt

    first = tuned(clock, resume=path, on_progress=stop)
    assert first.interrupted and not first.finished and first.policy.dtype == "bf16" and not first.chosen.changes
    assert "interrupted" in first.notes[0] and first.proof is None and "not tested for equivalence" in str(first)
    measured = clock.now
    second = tuned(clock, resume=path, minutes=SHORT / 2)
    assert second.proof == tuning.proof and second.policy == tuning.policy and clock.now - measured < measured


@pytest.mark.hours
def test_with_time_for_everything_changes_are_tried_and_an_interruption_costs_nothing(tmp_path: Path) -> None:
    whole = tuned(WorkClock(), minutes=LONG)
    assert whole.finished and not whole.notes and whole.proof is not None and whole.proof.holds
    assert any(t.changes and t.time is not None for t in whole.tried)
    path, count = tmp_path / "state.json", 0

    def stop(progress: Any) -> None:
        nonlocal count
        count += 1
        if count % 100 == 0:
            raise KeyboardInterrupt

    tuning = tuned(WorkClock(), minutes=LONG, resume=path, on_progress=stop)
    runs = 1
    while tuning.interrupted:
        tuning, runs = tuned(WorkClock(), minutes=LONG, resume=path, on_progress=stop), runs + 1
    assert runs > 2 and tuning.policy == whole.policy and tuning.proof == whole.proof
    assert (
        tuned(WorkClock(), minutes=LONG, resume=path).tried == tuning.tried
    )  # audits order what is tried by real time


def test_generators_are_restored() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    tuned(WorkClock(), minutes=0.1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_budget_that_is_too_small_gives_fp32_and_what_is_missing() -> None:
    tuning = tuned(WorkClock(), minutes=1.0)
    assert tuning.policy == hs.Policy.of("O0") and not tuning.finished and tuning.proof is None
    assert "the time was too short" in tuning.notes[0] and "more minutes are needed" in tuning.notes[0]
    assert hs.Policy.from_toml(tuning.to_toml()) == tuning.policy


def test_a_loss_that_does_not_fall_is_an_error() -> None:
    frozen = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-9)}
    with pytest.raises(TuneError, match="task 'work': the loss .* fp32"):
        tuned(WorkClock(), changes=frozen)


@pytest.mark.hours
def test_a_model_that_differs_from_run_to_run_is_noted() -> None:
    def noisy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(model, x, y) * (1.0 + 1e-3 * random.random())

    tuning = tuned(WorkClock(), changes={"loss_fn": noisy}, minutes=60.0)
    assert any("differ" in note for note in tuning.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "tim"}, "target='tim'; expected \"time\", \"memory\".*did you mean 'time'"),
        ({"target": "0:0"}, "target='0:0'"),
        ({"target": "1:-1"}, "target='1:-1'"),
        ({"max_loss_rise": 0.0}, "max_loss_rise must be a fraction above 0.* and is 0.0"),
        ({"minutes": 0}, "minutes must be a positive finite number and is 0"),
        ({"seeds": -1}, "seeds must be a whole number from 0 and is -1"),
        ({"dtypes": ["bf61"]}, "dtypes must be a list of formats.* and is \\['bf61'\\]"),
        ({"dtypes": "bf16"}, "dtypes must be a list of formats"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        hs.tune(small_task(), **options)


def test_a_model_is_no_task_and_a_device_must_be_here() -> None:
    with pytest.raises(TuneError, match=r"task must be an hs\.Task and is a Linear"):
        hs.tune(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="device 'gpu' is not here"):
        hs.tune(small_task(), device="gpu")


def test_targets_are_weights_that_add_up_to_one() -> None:
    assert weights_of("0.7:0.3").time == pytest.approx(0.7) and weights_of("3:1").memory == 0.25
    assert weights_of("time").memory == 0.0 and weights_of("memory").time == 0.0


def test_formats_are_those_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hs.policy.units("cpu")
    for bf16, fp16, formats in ((True, True, ("bf16", "fp16")), (False, True, ("fp16",)), (False, False, ("bf16",))):
        there = dataclasses.replace(here, bf16=bf16, fp16=fp16)
        monkeypatch.setattr(hs.policy, "units", lambda device, there=there: there)
        assert low_formats("cpu") == formats
