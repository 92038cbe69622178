"""What is noted before an optimizer or a scheduler steps tells what a failure has left, and puts it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.binding.prepare import store_of
from halfstep.snapshot import scheduler_state
from halfstep.update.optimizer_step import Marks

Lr = torch.optim.lr_scheduler


def made(kind: Any = torch.optim.AdamW, *, steps: int = 1, **named: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer: torch.optim.Optimizer = kind(parameters, **named)
    for _ in range(steps):
        optimizer.step()
    return optimizer


KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Lion": lambda p: hs.Lion(p),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_is_seen(kind: str, steps: int) -> None:
    optimizer = made(KINDS[kind], steps=steps)
    marks = Marks(optimizer, None)
    assert not marks.moved()
    optimizer.step()
    assert marks.moved()


@pytest.mark.parametrize("kind", KINDS)
def test_until_the_code_of_a_step_is_entered_nothing_has_moved(kind: str) -> None:
    optimizer = made(KINDS[kind])

    def fail(*args: Any) -> None:
        raise MemoryError

    handle = optimizer.register_step_pre_hook(fail)
    marks = Marks(optimizer, None)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert not marks.moved()
    handle.remove()
    marks.restore()
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("name", ["exp_avg", "step"])
def test_a_moment_that_moved_alone_is_seen(name: str) -> None:
    optimizer = made()
    marks = Marks(optimizer, None)
    marks._enter(optimizer, (), {})
    optimizer.state[optimizer.param_groups[0]["params"][1]][name].add_(1)
    assert marks.moved()


def test_states_that_a_step_only_began_are_taken_away() -> None:
    optimizer = made(steps=0)
    marks = Marks(optimizer, None)
    first, second = optimizer.param_groups[0]["params"]
    optimizer.state[first]["exp_avg"] = torch.zeros(3)
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    marks._enter(optimizer, (), {})
    assert not marks.moved()
    marks.restore()
    assert not optimizer.state and "grad_scale" not in vars(optimizer)
    optimizer.step()
    marks = Marks(optimizer, None)
    marks._enter(optimizer, (), {})
    optimizer.state[second]["max_exp_avg_sq"] = torch.zeros(2, 2)
    assert not marks.moved()
    marks.restore()
    assert set(optimizer.state[second]) == {"step", "exp_avg", "exp_avg_sq"}


class Unseen(torch.optim.Optimizer):
    """Writes as older optimizers do: torch counts nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.1)


class UnseenPart(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].data.sub_(0.1)
        return super().step(closure)


class Early(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize(("kind", "known"), [(Unseen, False), (UnseenPart, False), (Early, True)])
def test_an_optimizer_whose_writes_are_not_counted_may_have_moved(kind: Any, known: bool) -> None:
    optimizer = made(kind, steps=0)
    marks = Marks(optimizer, None)
    if known:
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    else:
        optimizer.step()
    assert marks.moved() is not known


def test_a_step_method_put_in_its_place_may_have_moved_something() -> None:
    optimizer = made()
    vars(optimizer)["step"] = lambda: None
    assert Marks(optimizer, None).moved()


@pytest.mark.parametrize("master", ["master", "split", "kahan", "stochastic"])
def test_what_stands_behind_low_weights_is_watched(master: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hs.prepare(model, optimizer, policy=hs.Policy.of("O2", dtype="bf16", master=master))
    store = store_of(model)
    assert store is not None
    marks = Marks(optimizer, store)
    assert not marks.moved()
    model(torch.ones(2, 4)).sum().backward()
    assert not marks.moved()
    optimizer.step()
    assert marks.moved()


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: Lr.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: Lr.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: Lr.SequentialLR(o, [Lr.ConstantLR(o), Lr.ExponentialLR(o, 0.5)], [2]),
    "ChainedScheduler": lambda o: Lr.ChainedScheduler([Lr.ConstantLR(o), Lr.ExponentialLR(o, 0.5)]),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True])
def test_a_scheduler_is_put_back(kind: str, tensor: bool) -> None:
    optimizer = made(lr=torch.tensor(0.1) if tensor else 0.1, foreach=False, capturable=False)
    scheduler = SCHEDULERS[kind](optimizer)

    def state() -> str:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return repr((scheduler.state_dict(), groups))

    optimizer.step()  # torch wants it before its schedulers step
    before = state()
    restore = scheduler_state(scheduler, optimizer)
    for _ in range(2):
        scheduler.step()
    assert state() != before
    restore()
    assert state() == before
    scheduler.step()
