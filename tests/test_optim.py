"""Lion: against the formula of its paper, and its skip on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep import GradScaler, Lion
from halfstep.errors import WeightsError


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(1)))


def test_it_is_the_formula_of_the_paper() -> None:
    parameter = weight()
    optimizer = Lion([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    theta, momentum = parameter.detach().double().clone(), torch.zeros(50, dtype=torch.float64)
    for i in range(20):
        gradient = torch.randn(50, generator=torch.Generator().manual_seed(10 + i))
        parameter.grad = gradient
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient.double())
        theta = theta - 0.01 * (update + 0.1 * theta)
        momentum = 0.99 * momentum + 0.01 * gradient.double()
    assert torch.allclose(parameter.double(), theta, rtol=1e-5, atol=1e-6)


def test_a_step_flagged_as_bad_changes_nothing() -> None:
    parameter = weight()
    optimizer, scaler = Lion([parameter], lr=0.01), GradScaler("cpu")
    for value, moved in ((1.0, True), (float("inf"), False), (1.0, True)):
        before = parameter.detach().clone()
        scaler.scale((parameter * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(parameter, before) is not moved
        assert bool(torch.isfinite(optimizer.state[parameter]["exp_avg"]).all())


def test_a_closure_is_evaluated_and_its_loss_returned() -> None:
    parameter = weight()
    optimizer = Lion([parameter])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss.detach()

    first = optimizer.step(closure)
    assert bool(optimizer.step(closure) < first)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}]
)
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match=next(iter(wrong))):
        Lion([weight()], **wrong)


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = Lion(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(WeightsError, match="sparse"):
        optimizer.step()


def test_it_is_in_hs_optim_too() -> None:
    assert hs.optim.Lion is hs.Lion
    with pytest.raises(AttributeError, match=r"halfstep\.optim.*'Adam'"):
        _ = hs.optim.Adam
