"""The state of a training step: copies, checkpoints, and loads that fail."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import ScaleError, StepError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def made(name: str = "O2", accumulate: int = 1) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    chosen = hs.Policy.of(name, dtype="fp16")
    return hs.TrainStep(model, optimizer, square, policy=chosen, scheduler=scheduler, accumulate=accumulate)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_a_copy_goes_on_as_the_step_does(copied: Callable[[hs.TrainStep], hs.TrainStep], name: str) -> None:
    step = made(name)
    for _ in range(3):
        step(X)
    twin = copied(step)
    assert twin.model is not step.model and twin.scheduler is not step.scheduler
    for _ in range(3):
        assert step(X).host() == twin(X).host()
    mine, other = step.state_dict(), twin.state_dict()
    assert all(torch.equal(mine["model"][k], other["model"][k]) for k in mine["model"])
    assert mine["scaler"] == other["scaler"] and mine["scheduler"]["last_epoch"] == other["scheduler"]["last_epoch"]


def test_a_copy_keeps_what_it_was_told_about_the_black_box(tmp_path: Path) -> None:
    for given in (False, True, tmp_path):
        step = hs.TrainStep(model := nn.Linear(8, 4), torch.optim.SGD(model.parameters(), 0.1), square, blackbox=given)
        for twin in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
            assert (twin.record.history is None) is (given is False)
            assert twin.evidence == (tmp_path if given is tmp_path else None)


def test_no_copy_in_the_middle_of_a_window() -> None:
    step = made(accumulate=2)
    step(X)
    with pytest.raises(StepError, match="a copy after 1 of 2 micro-batches would lose their gradients"):
        copy.deepcopy(step)


@pytest.mark.parametrize("part", ["optimizer", "scaler"])
def test_a_load_that_fails_changes_nothing(part: str) -> None:
    step = made()
    step(X)
    before = copy.deepcopy(step.state_dict())
    state = copy.deepcopy(before)
    for value in state["model"].values():
        value.zero_()
    if part == "optimizer":
        state["optimizer"]["param_groups"][0]["params"].pop()
        with pytest.raises(StepError, match=r"groups have \[3\] parameters, and here they have \[4\]"):
            step.load_state_dict(state)
    else:
        state["scaler"] = {}
        with pytest.raises(ScaleError, match="the state is empty"):
            step.load_state_dict(state)
    after = step.state_dict()
    assert all(torch.equal(after["model"][k], before["model"][k]) for k in before["model"])
    moments = [s["state"][0]["exp_avg"] for s in (after["optimizer"], before["optimizer"])]
    assert torch.equal(*moments) and after["scaler"] == before["scaler"]
