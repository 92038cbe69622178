"""A step that is cut off, at any line, leaves the state before it or after it, or refuses by name to go on."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step.parts import statistics
from tests.products import sampled
from tests.step.cutting import PLACES, Run, cut_everywhere, cut_run, plain, plain_copy, without_warnings

RUNS = [
    Run(policy=policy, optimizer=optimizer, accumulate=accumulate, scheduler=scheduler)
    for policy in ("mixed, bf16", "mixed, fp16", "O2, split", "O2, master", "stochastic", "pure")
    for optimizer in ("adamw", "rmsprop")
    for accumulate, scheduler in ((1, "step"), (2, "none"))
]
KINDS = (KeyboardInterrupt, MemoryError)
SOME = [i for i in range(len(RUNS)) if (i // 4 + i // 2 + i) % 2 == 0]
"""Two runs of each policy: with both optimizers, both windows and both exceptions."""

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def check(run: Run, kind: type[BaseException], first: float, stride: int) -> Counter[str]:
    """Cut the second update of `run` at every `stride`-th event from the share `first` on; return the outcomes."""
    return cut_everywhere(run, 2 * run.accumulate - 1, kind, stride, first)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # cut off in a generator that ends
@pytest.mark.parametrize(
    ("run", "kind"),
    [
        pytest.param(
            run, (KeyboardInterrupt, MemoryError)[(i // 4 + i) % 2], marks=() if i in SOME else pytest.mark.slow
        )
        for i, run in enumerate(RUNS)
    ],
    ids=str,
)
def test_some_lines(run: Run, kind: type[BaseException]) -> None:
    def some() -> str:
        assert check(run, kind, first=0.0, stride=401)
        return ""

    without_warnings(some)


@pytest.mark.hours
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # cut off in a generator that ends
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_line(run: Run, kind: type[BaseException]) -> None:
    def all_() -> str:
        outcomes = check(run, kind, first=0.0, stride=1)
        assert outcomes["before"] and outcomes["after"]
        assert bool(outcomes["refused"]) is (kind is MemoryError)  # Ctrl-C waits
        return ""

    without_warnings(all_)


@pytest.mark.parametrize(
    "run", [RUNS[0], *(pytest.param(run, marks=pytest.mark.slow) for run in (RUNS[2], RUNS[8]))], ids=str
)
def test_every_line_of_an_update_under_ctrl_c(run: Run) -> None:
    """Nothing is refused: signals wait for the end of what cannot be undone."""

    def update() -> str:
        outcomes = check(run, KeyboardInterrupt, first=0.6, stride=5)
        assert outcomes["after"] and not outcomes["refused"]
        return ""

    without_warnings(update)


HOOKS = {
    "forward": "before",
    "backward": "before",
    "before the update": "before",
    "before the step": "before",
    "after the step": "refused",
    "after the update": "after",
}


@pytest.mark.parametrize(
    ("policy", "optimizer", "place"),
    sampled(("mixed, bf16", "O2, split", "O2, master"), ("adamw", "sgd", "rmsprop", "adamw, foreach"), PLACES),
)
def test_a_hook_of_the_users_that_raises(policy: str, optimizer: str, place: str) -> None:
    run = Run(policy=policy, optimizer=optimizer, scheduler="step")
    outcomes: list[str] = []
    assert without_warnings(lambda: cut_run(run, run.states(), 1, place, outcomes)) == ""
    assert outcomes == [HOOKS[place]]


# ---------------------------------------------------------------------- one at a time


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def made(optimizer: Any = torch.optim.RMSprop, policy: str = "mixed", **named: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    chosen = hs.Policy.of(policy, dtype=named.pop("dtype", "bf16"))
    return hs.TrainStep(model, optimizer(model.parameters(), 0.01), square, policy=chosen, **named)


def fail(*args: Any) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("policy", ["mixed", "O2"])
@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, torch.optim.AdamW])
def test_micro_batches_of_an_update_that_raised_are_not_counted(optimizer: Any, policy: str, accumulate: int) -> None:
    step, twin = (made(optimizer, policy, accumulate=accumulate) for _ in range(2))
    numbers = []
    for update in range(3):
        handle = step.optimizer.register_step_pre_hook(fail) if update == 1 else None
        for micro in range(accumulate):
            if handle is not None and micro == accumulate - 1:
                with pytest.raises(MemoryError):
                    step(X)
                handle.remove()
                assert step.flush() is None  # the window is lost
            else:
                numbers.append(step(X).step)
                if update != 1:
                    twin(X)
    assert step.state_dict()["step"] == 2 * accumulate
    assert numbers[-accumulate:] == [accumulate + 1 + n for n in range(accumulate)]
    assert plain(step.state_dict()) == plain(twin.state_dict())


def torn() -> tuple[hs.TrainStep, dict[str, Any]]:
    """Return a step whose second update was cut off, and the state before it."""
    step = made()
    step(X)
    state = plain_copy(step.state_dict())
    handle = step.optimizer.register_step_post_hook(fail)
    with pytest.raises(MemoryError):
        step(X)
    handle.remove()
    return step, state


@pytest.mark.parametrize("call", ["__call__", "flush", "state_dict", "__reduce__"])
def test_a_torn_step_refuses_every_use_and_says_what_helps(call: str) -> None:
    step, state = torn()
    text = r"^MemoryError \(no room\) cut off the update after 1 micro-batches.*with step\.load_state_dict"
    for _ in range(2):
        with pytest.raises(StepError, match=text):
            getattr(step, call)(*([X] if call == "__call__" else []))
    step.load_state_dict(state)
    step(X)


def test_a_malformed_checkpoint_does_not_end_the_refusal() -> None:
    step, state = torn()
    with pytest.raises(StepError, match="step: None"):
        step.load_state_dict({**state, "step": None})
    with pytest.raises(StepError, match="cut off"):
        step(X)


def test_a_new_step_goes_on_from_what_is_there() -> None:
    step, _ = torn()
    again = hs.TrainStep(step.model, step.optimizer, square)
    assert again(X).host().updated


def test_an_alarm_that_raises_leaves_everything_counted() -> None:
    """The scale's rule raises at its floor, after the bad update was skipped: that is no torn step."""

    def infinite(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * float("inf")

    scaler = hs.GradScaler("cpu", rule=hs.ScaleRule(init=4.0, floor=4.0, at_floor="raise"))
    step = made(torch.optim.AdamW, dtype="fp16", scaler=scaler)
    step(X)
    before = plain(step.state_dict())
    good, step.loss_fn = step.loss_fn, infinite
    with pytest.raises(hs.HalfstepError, match="floor"):
        step(X)
    step.loss_fn = good
    after = plain(step.state_dict())
    assert after["model"] == before["model"] and after["optimizer"] == before["optimizer"]
    assert after["step"] == "2" and after["scaler"] != before["scaler"]
    assert step(X).host().updated


class Ends(torch.optim.lr_scheduler.StepLR):
    """Refuses to go on, as OneCycleLR does at its end, or fails once."""

    errors: Any = ()

    def step(self, epoch: Any = None) -> None:
        super().step()
        if self.errors and self.last_epoch == 2:
            raise self.errors.pop()


def scheduled(error: Any) -> tuple[hs.TrainStep, Ends]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = Ends(optimizer, 1, 0.5)
    scheduler.errors = [] if error is None else [error]
    return hs.TrainStep(model, optimizer, square, policy="O0", scheduler=scheduler), scheduler


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError("no room")])
def test_a_scheduler_that_is_cut_off_is_put_back_and_tried_again(error: Any) -> None:
    (step, scheduler), (twin, other) = scheduled(error), scheduled(None)
    for one in (step, twin):
        one(X), one(X)
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        step(X)
    assert scheduler.last_epoch == 1 and step.optimizer.param_groups[0]["lr"] == 0.005
    step(X), twin(X)
    assert scheduler.last_epoch == other.last_epoch == 2
    assert plain(step.state_dict()["model"]) == plain(twin.state_dict()["model"])


def test_a_scheduler_that_refuses_to_go_on_is_named_and_can_be_left_out() -> None:
    step, scheduler = scheduled(ValueError("tried to step 3 times"))
    step(X), step(X)
    with pytest.raises(
        StepError, match=r"Ends\.step\(\) raised ValueError: tried to step 3 times.*step\.scheduler = None"
    ):
        step(X)
    assert scheduler.last_epoch == 1
    assert step.state_dict()["scheduler"]["last_epoch"] == 1  # and what was trained can be saved
    step.scheduler = None
    step(X)


def test_a_handler_that_only_notes_a_signal_is_called_once_the_update_is_whole() -> None:
    found: list[tuple[int, int]] = []
    step = made()
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append((number, step.record.done)))
    handle = step.optimizer.register_step_post_hook(lambda *args: signal.raise_signal(signal.SIGTERM))
    try:
        step(X)
    finally:
        signal.signal(signal.SIGTERM, before)
        handle.remove()
    assert found == [(signal.SIGTERM, 1)]


def test_statistics_are_put_back_where_the_handling_of_an_error_was_cut_off_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = made()
    step(X)
    before = plain(step.state_dict())

    def raises(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise ZeroDivisionError

    good, step.loss_fn = step.loss_fn, raises
    with monkeypatch.context() as patch:
        patch.setattr(statistics, "foreach_copy_", fail)
        with pytest.raises(MemoryError):
            step(X)
    step.loss_fn = good
    assert plain(step.state_dict()) == before
