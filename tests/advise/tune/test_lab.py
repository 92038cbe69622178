"""What a search measures: races with exact times, what fails in them, references, the journal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.advise.tune import TuneError
from halfstep.advise.tune.calibration import applied, calibration_of, differences, exceptions, savings
from halfstep.advise.tune.lab import Lab, RaceResult, Reference, race, revived
from halfstep.errors import TaskError
from halfstep.tasks.candidates import FP32, Candidate
from tests.advise.tune.clocks import WorkClock, batches, loss_fn, work_task

MIXED = Candidate(label="mixed bf16", dtype="bf16", policy=hs.Policy.of("mixed", dtype="bf16"))
SAFE = Candidate(label="O0", dtype="fp32", policy=hs.Policy.of("O0"))


def raced(task: hs.Task, clock: WorkClock, *candidates: Candidate, **options: Any) -> RaceResult:
    return race(task, candidates, device="cpu", seed=0, clock=clock, **options)


def test_a_race_has_the_exact_times_of_its_candidates() -> None:
    clock = WorkClock()
    found = raced(work_task(clock), clock, MIXED, SAFE, base="O0")
    lap = found.laps["mixed bf16"]
    assert lap.time is not None and lap.time.median == lap.time.low == 0.5 and lap.beside == lap.time
    assert lap.milliseconds == 1000.0 and found.control is not None and found.control.high == 1.0
    assert found.repeatable and found.finished and set(found.laps) == {FP32, "mixed bf16", "O0"}


def test_a_candidate_that_raises_is_a_fact_and_the_others_go_on() -> None:
    clock = WorkClock()

    def raising(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if model(x).dtype is torch.bfloat16:
            raise torch.OutOfMemoryError("no memory\nfor this")
        return loss_fn(model, x, y)

    found = raced(work_task(clock, loss_fn=raising), clock, MIXED, SAFE)
    assert found.laps["mixed bf16"].failed == "OutOfMemoryError: no memory"
    assert not found.laps["O0"].failed and found.finished


def test_what_is_clearly_slower_leaves_early() -> None:
    clock = WorkClock()
    found = raced(work_task(clock, low=3.0), clock, MIXED, SAFE, limit=1.5)
    assert found.laps["mixed bf16"].dropped and not found.laps["O0"].dropped
    time = found.laps["mixed bf16"].time
    assert time is not None and time.rounds == 5 and time.median == 3.0


def test_where_one_is_to_be_picked_those_that_are_beaten_leave_with_their_times() -> None:
    clock = WorkClock()
    found = raced(work_task(clock), clock, MIXED, SAFE, pick=True)
    beaten, first = found.laps["O0"], found.laps["mixed bf16"]
    assert beaten.time is not None and first.time is not None and not (beaten.dropped or beaten.failed)
    assert (beaten.time.rounds, first.time.rounds) == (5, 25)


def test_changes_of_one_candidate_are_raced_beside_it_alone() -> None:
    clock = WorkClock()
    found = raced(work_task(clock), clock, MIXED, SAFE, base="mixed bf16", alone=True)
    assert set(found.laps) == {"mixed bf16", "O0"} and found.control is None
    lap = found.laps["O0"]
    assert lap.time is None and lap.beside is not None and lap.beside.median == 2.0
    before = clock.now
    over = raced(work_task(clock), clock, MIXED, SAFE, base="mixed bf16", alone=True, limit=1.0)
    assert over.finished and over.laps["O0"].dropped and clock.now - before == 8 * (1.0 + 2.0)


def test_a_race_that_the_clock_ends_is_not_finished() -> None:
    clock = WorkClock()
    found = raced(work_task(clock), clock, SAFE, deadline=50.0)
    assert not found.finished and found.laps["O0"].time is not None


def test_fp32_that_raises_ends_the_search() -> None:
    clock = WorkClock()

    def raising(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(TuneError, match="does not train in fp32.*RuntimeError: broken"):
        raced(work_task(clock, loss_fn=raising), clock, SAFE)


# ------------------------------------------------------------------ the reference


def reference(start: tuple[float, ...], end: tuple[float, ...]) -> Reference:
    return Reference(start=start, end=end)


@pytest.mark.parametrize(
    ("start", "end", "bound", "flaw"),
    [
        ((3.0, 3.1, 2.9), (1.0, 1.1, 0.9), None, ""),
        ((1.0, 1.1, 0.9), (1.1, 0.9, 1.0), None, "does not fall"),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), None, "does not fall"),
        ((1.0, 1.1, 0.9), (math.nan, 1.0, 1.0), None, "not finite"),
        ((2.0, 2.0, 2.01), (1.0, 1.0, 1.01), 1.5, "learns nothing could pass"),
    ],
)
def test_what_can_be_no_reference_is_named(start: Any, end: Any, bound: float | None, flaw: str) -> None:
    found = reference(start, end).flaw(bound)
    assert flaw in found and bool(found) == bool(flaw)


# ------------------------------------------------------------------ the journal


def lab(clock: WorkClock, path: Path, **changes: Any) -> Lab:
    return Lab(work_task(clock, **changes), "cpu", seed=0, seconds=1e9, path=path, clock=clock)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "state.json", WorkClock()
    first = lab(clock, path)
    made = first.race([MIXED]), first.calibration(MIXED, 20), first.bytes(MIXED)
    spent = clock.now
    again = lab(clock, path)
    assert (again.race([MIXED]), again.calibration(MIXED, 20), again.bytes(MIXED)) == made
    assert clock.now == spent and again.spent == first.spent > 0.0


def test_a_race_that_the_clock_ended_is_made_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "state.json", WorkClock()
    short = lab(clock, path)
    short.pace()
    short.deadline = clock.now + 400.0
    short.seconds = 400.0
    made = short.race([MIXED])
    assert made is not None and made.finished
    short.deadline = clock.now + 200.0  # 2 candidates beside fp32 are promised 28 steps, and have fewer
    assert short.race([MIXED, SAFE], seed=1) is None


def test_the_audits_have_the_weights_of_the_reference_and_a_candidate_its_first_training_of_the_proof() -> None:
    clock = WorkClock()
    found = Lab(work_task(clock), "cpu", seed=0, seconds=1e9, clock=clock)
    assert found.reference(20, 0.5) is not None
    before = clock.now
    again = Lab(work_task(clock), "cpu", seed=0, seconds=1e9, clock=clock)
    trained = found._loop(20).model.state_dict()
    assert clock.now == before
    assert all(torch.equal(value, trained[name]) for name, value in again._loop(20).model.state_dict().items())
    run, before = found.training(MIXED, 20, 0.5, reserve=0.0), clock.now
    assert run is not None and math.isfinite(run.last_loss) and run.seed == 0
    proof = found.prove(MIXED, 20, bound=0.5, seeds=0)
    assert proof.values[0] == run.value and proof.holds and len(proof.values) == len(proof.fp32) == 3
    assert clock.now - before == 2 * 20 * 1.0
    assert found.training(SAFE, 20, 0.5, reserve=1e9) is None


def test_measurements_of_another_task_are_refused(tmp_path: Path) -> None:
    path, clock = tmp_path / "state.json", WorkClock()
    lab(clock, path).pace()
    with pytest.raises(TuneError, match="another search.*weights"):
        lab(clock, path, model=lambda: nn.Linear(8, 1))
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(TuneError, match="holds no measurements"):
        lab(clock, path)


def test_batches_that_change_are_refused() -> None:
    clock = WorkClock()
    with pytest.raises(TaskError, match="gave other numbers when it was called again"):
        Lab(work_task(clock, batches=lambda seed, step: (torch.randn(4, 8), torch.randn(4, 1))), "cpu", seed=0,
            seconds=1.0, clock=clock)  # fmt: skip


def test_the_journal_is_whole_after_every_measurement(tmp_path: Path) -> None:
    path, clock = tmp_path / "state.json", WorkClock()
    lab(clock, path).race([MIXED])
    values = json.loads(path.read_text(encoding="utf-8"))
    assert len(values["entries"]) == 2 and not list(tmp_path.glob("*.part"))


# ------------------------------------------------------------------ calibration and moves


def test_an_audit_becomes_spots() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    audit = hs.audit(model, [batches(0, 0)], loss_fn, MIXED.policy, steps=1)
    found = calibration_of(audit)
    by_place = {(spot.module, spot.op): spot for spot in found.spots}
    assert by_place["0", "linear"].kind == "Linear" and by_place["0", "linear"].cast_bytes > 0
    assert 1e-4 < by_place["0", "linear"].error < 1e-2
    assert found == revived(type(found), json.loads(json.dumps(_plain(found))))
    assert {spot.module for spot in found.covered("modules", "class:Linear")} == {"0", "2"}
    assert len(found.covered("ops", "linear")) == 2
    policy = MIXED.policy
    assert policy is not None
    assert all(r.value == "fp32" for r in exceptions(found, policy))
    tried = [(r.field, r.pattern, r.value) for r in savings(found, policy)]
    assert ("ops", "linear", "fp32") in tried and ("residual", "", "low") in tried
    assert ("modules", "class:Linear", "fp32") not in tried  # the operator is the same
    assert len(set(tried)) == len(tried) <= 16
    more = [r for r in savings(found, policy, eight_bits=True) if r.value == "fp8"]
    assert [(r.field, r.pattern) for r in more] == [("modules", "class:Linear")] and "fp8" not in str(tried)


def _plain(value: Any) -> Any:
    import dataclasses

    return dataclasses.asdict(value)


def test_changes_are_found_between_policies_and_made_again() -> None:
    base = hs.Policy.of("mixed", dtype="bf16")
    other = base.with_ops(fp32=["softmax"]).with_modules({"head": "fp32"}).replace(residual="low", scale=64.0)
    changes = differences(base, other)
    assert applied(base, changes) == other and len(changes) == 4
