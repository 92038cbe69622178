"""Optimizers of torch's older protocol get the scaler in `step`, as torch.amp.GradScaler gives itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.scale import GradScaler
from halfstep.scale.older import takes_scaler
from tests.scale.loops import INF


class Unscales(torch.optim.Optimizer):
    """Unscales through the scaler."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        if grad_scaler is not None:
            grad_scaler.unscale_(self)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)


class Checks(Unscales):
    """Reads scale and flag, as Apex's capturable optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        factor = torch.ones(())
        if grad_scaler is not None:
            assert grad_scaler._found_inf_per_device(self) == {}
            found = grad_scaler._check_inf_per_device(self)[torch.device("cpu")]
            factor = (1 - found) / grad_scaler._get_scale_async()
        for p in self.param_groups[0]["params"]:
            p.sub_(torch.nan_to_num(p.grad, 0.0, 0.0, 0.0) * factor)


class Asks(Unscales):
    """Asks for the scale only."""

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        scale = 1.0 if grad_scaler is None else grad_scaler.get_scale()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / scale)


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("kind", [Unscales, Checks])
def test_it_steps_as_under_torch(kind: type[Unscales], make: Any) -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer, scaler = kind([p]), make("cpu", init_scale=1024.0)
    for factor in (1.0, INF if kind is Checks else 1.0, 1.0):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(p.sum() * factor))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch announces the end of the protocol
            scaler.step(optimizer)
        scaler.update()
    assert p.tolist() == ([-2.0, -2.0] if kind is Checks else [-3.0, -3.0])
    assert scaler.get_scale() == (512.0 if kind is Checks else 1024.0)


def test_the_scale_answers_one_that_asks_for_no_verdict() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer, scaler = Asks([p]), GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    assert scaler._get_scale_async() is None
    torch.autograd.backward(scaler.scale(p.sum()))
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0] and not scaler.skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    optimizer.zero_grad()
    assert scaler.step(optimizer) is None  # no gradients: not called


def test_gradients_that_come_after_unscale_are_unscaled_for_it() -> None:
    p, q = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer, scaler = Asks([p, q]), GradScaler("cpu", init_scale=1024.0)
    torch.autograd.backward(scaler.scale(p.sum()))
    scaler.unscale_(optimizer)
    torch.autograd.backward(scaler.scale(q.sum()))
    scaler.step(optimizer)
    assert p.tolist() == q.tolist() == [-1 / 1024] * 2  # it divides by the scale itself, always


@pytest.mark.parametrize("kind", [Unscales, Checks, Asks])
def test_inside_a_step_it_gets_unscaled_gradients(kind: type[Unscales]) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    policy = hs.Policy.of("O0", scale=1024.0)
    step = hs.TrainStep(model, kind(model.parameters()), lambda m, x: m(x).sum(), policy=policy)
    step(torch.ones(1, 2))
    assert model.weight.tolist() == [[-1.0, -1.0]]


def test_who_takes_the_scaler() -> None:
    p = [nn.Parameter(torch.zeros(2))]
    assert takes_scaler(Unscales(p))
    others = (torch.optim.SGD(p, lr=1.0), torch.optim.Adam(p, fused=True), hs.Lion(p, lr=0.1))
    assert not any(map(takes_scaler, others))
