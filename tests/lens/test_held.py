"""How many batches the black box holds, and what a verdict can still name where it holds fewer."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step.parts.record import History
from tests.step.late import late

BYTES = 4 * 8 * 4
"""Of one batch."""


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def made(accumulate: int = 8, **named: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    policy = hs.Policy.of("mixed", dtype="bf16")
    return hs.TrainStep(model, optimizer, loss_fn, policy=policy, accumulate=accumulate, **named)


def rows(bad: bool = False) -> Tensor:
    x = torch.randn(4, 8)
    x[1, 2] = float("inf") if bad else 0.0
    return x


class Loader:
    """Hands out batches and counts those that are still alive."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[Tensor]] = []

    def __call__(self, bad: bool = False) -> Tensor:
        x = rows(bad)
        self._given.append(weakref.ref(x))
        return x

    def alive(self) -> int:
        return sum(ref() is not None for ref in self._given)


def held(step: hs.TrainStep, calls: int, bad: int = -1) -> list[int]:
    """Return how many batches are alive after each call."""
    loader = Loader()
    counts = []
    for i in range(calls):
        step(loader(i == bad))
        counts.append(loader.alive())
    return counts


@pytest.mark.parametrize("bad", [-1, 3])
def test_only_the_current_window_is_held_between_calls(bad: int) -> None:
    step = made()
    late(step)
    assert held(step, 24, bad) == [*range(1, 9)] * 3


def test_inside_the_first_call_of_a_window_the_last_one_is_held_too() -> None:
    """Its verdict is not known before the passes are queued."""
    step, loader, seen = made(), Loader(), []
    late(step)

    def watched(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(loader.alive())
        return loss_fn(model, x)

    step.loss_fn = watched
    for _ in range(17):
        step(loader())
    assert seen == [*range(1, 9), 9, *range(2, 9), 9]


def test_on_a_cpu_a_good_window_is_let_go_with_its_update() -> None:
    assert held(made(), 17) == [*range(1, 8), 0, *range(1, 8), 0, 1]


@pytest.mark.parametrize("behind", [True, False])
def test_beyond_the_limit_the_oldest_batches_are_dropped(behind: bool) -> None:
    step = made()
    if behind:
        late(step)
    assert step.record.history is not None
    step.record.history.limit = 3 * BYTES
    assert max(held(step, 24)) == 3
    step.record.history.limit = 0
    assert max(held(step, 24)) == 1


def explained(bad: int, limit: int, caplog: pytest.LogCaptureFixture) -> hs.lens.Verdict:
    """Return the verdict on a window whose micro-batch `bad`, from 0, is not finite."""
    step = made()
    assert step.record.history is not None
    step.record.history.limit = limit * BYTES
    with caplog.at_level(logging.WARNING, "halfstep"):
        for i in range(8):
            result = step(rows(i == bad))
    assert result.host().skipped and len(caplog.records) == 1
    return step.explain()


def test_a_fault_in_what_is_still_held_is_named(caplog: pytest.LogCaptureFixture) -> None:
    verdict = explained(6, 3, caplog)
    assert verdict.kind == "bad_batch" and "micro-batch 7 of 8 of its window" in verdict.notes
    note = "micro-batches 1 to 5 of 8 were dropped and not run again: the batches exceeded step.record.history.limit, "
    assert f"{note}{3 * BYTES} bytes" in verdict.notes


def test_a_fault_in_what_was_dropped_is_not_blamed_on_another(caplog: pytest.LogCaptureFixture) -> None:
    verdict = explained(1, 3, caplog)
    assert verdict.kind == "not_reproducible" and any("micro-batches 1 to 5 of 8" in note for note in verdict.notes)


def test_a_late_verdict_on_a_batch_that_is_gone_names_the_loss_and_the_limit(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    step = made(accumulate=1, blackbox=tmp_path)
    late(step)
    assert step.record.history is not None
    step.record.history.limit = BYTES
    before = repr(step.model.state_dict())
    step(rows(bad=True))
    assert repr(step.model.state_dict()) == before
    with caplog.at_level(logging.WARNING, "halfstep"):
        step(rows())
    evidence, record = caplog.records
    text = "the loss of micro-batch 1 of 1 is not finite; not replayed: micro-batches 1 to 1 of 1 were dropped"
    assert text in record.getMessage()
    assert "evidence of step 1 is its report alone: micro-batches 1 to 1 of 1 were dropped" in evidence.getMessage()
    (report,) = tmp_path.iterdir()
    assert text in report.read_text()


def test_within_the_limit_a_late_verdict_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    step = made(accumulate=1)
    late(step)
    step(rows(bad=True))
    with caplog.at_level(logging.WARNING, "halfstep"):
        step(rows())
    (record,) = caplog.records
    assert "input 0 holds inf in sample 1 at [2]: 1 of 32" in record.getMessage()


def test_a_window_that_may_run_again_stays_whole() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    scaler = hs.GradScaler("cpu", init_scale=2.0**30)
    policy = hs.Policy.of("mixed", dtype="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy, accumulate=4, scaler=scaler, retry=True)
    assert step.record.history is not None
    step.record.history.limit = 0
    results = [step(rows()) for _ in range(4)]
    assert results[-1].host().updated and results[-1].retries > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_replay_without_room_ends_no_training(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The run has the bits of one without a black box, and its log says why nothing is explained."""

    def no_room(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:  # the replay of the first step
            raise error
        return loss_fn(model, x)

    runs = []
    for blackbox in (True, False):
        calls: list[int] = [] if blackbox else [1, 1]
        step = made(accumulate=1, blackbox=blackbox)
        step.loss_fn = no_room
        torch.manual_seed(1)
        with caplog.at_level(logging.WARNING, "halfstep"):
            for i in range(4):
                step(rows(bad=i == 0))
        runs.append(repr(step.state_dict()))
        assert len(calls) == (5 if blackbox else 6)
    assert runs[0] == runs[1]
    (record,) = caplog.records
    assert "step 1 was not finite, and StepError: the replay of step 1 failed: " in record.getMessage()
    assert type(error).__name__ in record.getMessage()


def test_an_explanation_without_room_raises_what_torch_raises() -> None:
    lack, calls = torch.OutOfMemoryError("CUDA out of memory"), []

    def no_room(model: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) >= 2:  # each replay of the first step
            raise lack
        return loss_fn(model, x)

    step = made(accumulate=1)
    step.loss_fn = no_room
    step(rows(bad=True))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step.explain()
    assert raised.value is lack


@pytest.mark.parametrize("limit", ["1GB", -1, 0.5, True])
def test_the_limit_is_a_number_of_bytes(limit: Any) -> None:
    history = History(torch.nn.Linear(2, 2))
    before = history.limit
    with pytest.raises(StepError, match=r"^history: limit must be a number of bytes, a whole number from 0 and is"):
        history.limit = limit
    assert history.limit == before
