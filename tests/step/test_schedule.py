"""The scheduler of a TrainStep advances without the host waiting for a device that has nothing else to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step.moments import Phase
from halfstep.testing import count_step
from tests.step.cutting import Run, cut_everywhere, without_warnings
from tests.step.late import late

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def made(gamma: float = 0.5, *, scheduled: bool = True, loss: Any = loss_fn, **named: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) if scheduled else None
    return hs.TrainStep(model, optimizer, loss, scheduler=scheduler, **named)


def values(step: hs.TrainStep) -> str:
    return repr(step.state_dict())


def batches(accumulate: int = 1) -> list[Tensor]:
    """Return the batches of 8 updates, the third of which is not finite."""
    return [X * (float("inf") if i == 3 * accumulate - 1 else 1 + i / 8) for i in range(8 * accumulate)]


# ---------------------------------------------------------------------- when the host waits


@pytest.mark.parametrize("blackbox", [True, False])
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_host_waits_for_an_update_when_the_next_passes_are_queued(
    accumulate: int, scheduled: bool, blackbox: bool
) -> None:
    """Never for the whole device, and once an update only where black box or scheduler needs its verdict."""
    queued: list[str] = []

    def seen(model: nn.Module, x: Tensor) -> Tensor:
        queued.append(f"forward, {landing.waits} waits")
        loss = loss_fn(model, x)
        loss.register_hook(lambda gradient: queued.append(f"backward, {landing.waits} waits"))
        return loss

    step = made(scheduled=scheduled, loss=seen, accumulate=accumulate, blackbox=blackbox)
    landing = late(step)
    for _ in range(4 * accumulate):
        step(X)
    reads = scheduled or blackbox
    before = [0, 0, 1, 2] if reads else [0] * 4  # of each window's first forward pass
    for update, waits in enumerate(before):
        first = 2 * accumulate * update
        assert queued[first : first + 2] == [f"forward, {waits} waits", f"backward, {waits} waits"]
    assert landing.waits == (3 if reads else 0)
    assert step.host_reads == 0


def test_a_verdict_that_has_arrived_is_used_at_once() -> None:
    """So a loss function sees the learning rate of the coming update, as on a CPU."""
    seen: list[float] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(step.optimizer.param_groups[0]["lr"])
        return loss_fn(model, x)

    step = made(loss=loss)
    landing = late(step)
    for i in range(4):
        step(X)
        if i < 2:
            landing.land()
    assert seen == [0.1, 0.05, 0.025, 0.025] and landing.waits == 1


def test_without_black_box_a_flag_is_sent_only_for_a_scheduler() -> None:
    step = made(scheduled=False, blackbox=False)
    landing = late(step)
    step(X), step(X)
    assert not landing.sent()
    step.scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
    step(X), step(X)
    assert landing.sent() and landing.waits == 1 and step.scheduler.last_epoch == 2


def test_no_operator_reads_a_flag_on_a_cpu() -> None:
    for step in (made(), made(scheduled=False)):
        assert count_step(step, X).syncs == () and step.host_reads == 0


# ---------------------------------------------------------------------- what it changes


@pytest.mark.parametrize("blackbox", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_late_verdict_gives_the_same_run(accumulate: int, dtype: str, blackbox: bool) -> None:
    """Each update has the same rate, and the rate between two calls is the same."""
    runs = []
    for behind in (False, True):
        policy = hs.Policy.of("mixed", dtype=dtype)
        step = made(policy=policy, accumulate=accumulate, blackbox=blackbox)
        if behind:
            late(step)
        rates = []
        for x in batches(accumulate):
            step(x)
            rates.append(step.optimizer.param_groups[0]["lr"])
        assert step.scheduler is not None and step.scheduler.last_epoch == 6  # the last verdict is not read yet
        runs.append((rates, values(step)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("read", [hs.TrainStep.state_dict, hs.TrainStep.flush, hs.TrainStep.__reduce__])
def test_what_reads_a_step_brings_its_scheduler_up_to_date(read: Any) -> None:
    step = made()
    landing = late(step)
    step(X)
    read(step)
    assert step.scheduler is not None and step.scheduler.last_epoch == 1 and landing.waits == 1


class Refuses(torch.optim.lr_scheduler.ExponentialLR):
    """Raises once, after it has changed something."""

    errors: Any = ()

    def step(self, *args: Any) -> None:
        super().step(*args)
        if self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("the end")])
def test_a_scheduler_that_fails_in_the_middle_of_a_call(error: Any, accumulate: int) -> None:
    """The window is undone, BatchNorm's statistics too; only an interrupted scheduler is tried again."""
    step, twin = made(accumulate=accumulate), made(accumulate=accumulate)
    for one in (step, twin):
        one.scheduler = Refuses(one.optimizer, 0.5)
        late(one)
        for _ in range(accumulate):
            one(X)
    before = repr(step.model.state_dict())
    assert isinstance(step.scheduler, Refuses) and twin.scheduler is not None
    step.scheduler.errors, twin.scheduler.errors = [error], []  # type: ignore[attr-defined]
    with pytest.raises((KeyboardInterrupt, StepError)):
        step(2 * X)
    assert repr(step.model.state_dict()) == before and step._moments.phase is Phase.REST
    assert step.scheduler.last_epoch == 0 and step.optimizer.param_groups[0]["lr"] == 0.1
    if error is not KeyboardInterrupt:
        twin.record.bad = None
    for one in (step, twin):
        for _ in range(accumulate):
            one(3 * X)
    assert step.scheduler.last_epoch == twin.scheduler.last_epoch == (1 if error is KeyboardInterrupt else 0)
    assert values(step) == values(twin)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # cut off in a generator that ends
@pytest.mark.parametrize("stride", [401, pytest.param(1, marks=pytest.mark.hours)])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(("accumulate", "micro"), [(1, 1), (2, 2)])
def test_a_call_that_is_cut_off_while_flags_are_late(
    accumulate: int, micro: int, kind: type[BaseException], stride: int
) -> None:
    run = Run(scheduler="step", accumulate=accumulate, behind=True)

    def check() -> str:
        assert cut_everywhere(run, micro, kind, stride)["before"]
        return ""

    without_warnings(check)
