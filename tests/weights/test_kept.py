"""Optimizers that keep parameters or fp32 values of their own, and exceptions that keep those of a step."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import WeightsError

STRATEGIES = ["master", "split", "kahan", "stochastic"]


def policy(master: Any, dtype: Any = "bf16") -> hs.Policy:
    return hs.Policy.of("O2", dtype=dtype, master=master)


class OwnList(torch.optim.Optimizer):
    """Moves the parameters that it was made with, and not those in its groups."""

    def __init__(self, parameters: Any, lr: float, *, form: str = "method") -> None:
        self.own, self.form = list(parameters), form
        super().__init__(self.own, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.defaults["lr"]
        if self.form == "foreach":
            torch._foreach_add_(self.own, [p.grad.sign() for p in self.own], alpha=-rate)
        for p in self.own if self.form != "foreach" else ():
            add = p.add_ if self.form == "method" else partial(torch.ops.aten.add_, p)
            add(p.grad.sign(), alpha=-rate)


def moved(optimizer: Any, model: nn.Module, steps: int = 50) -> float:
    """Return how far the weights go on average; each update is far below half of a bf16 weight's last digit."""
    before = model.state_dict()["weight"].clone()
    for _ in range(steps):
        model(torch.ones(4, 64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float((before - model.state_dict()["weight"]).mean())


@pytest.mark.parametrize("form", ["method", "foreach"])
@pytest.mark.parametrize("master", ["master", "split", "kahan"])
def test_an_optimizer_with_a_list_of_its_own_trains_fp32_values(master: str, form: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = OwnList(model.parameters(), 1e-5, form=form)
    hs.prepare(model, optimizer, policy=policy(master))
    assert moved(optimizer, model) == pytest.approx(5e-4, rel=0.05)


def test_what_its_kernels_write_is_taken_over_and_told() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = OwnList(model.parameters(), 1e-2, form="kernel")
    hs.prepare(model, optimizer, policy=policy("master"))
    with pytest.warns(UserWarning, match="the low weight (weight|bias) was written by no method of its own"):
        assert moved(optimizer, model, 10) == pytest.approx(0.1, rel=0.05)


def test_it_is_refused_where_its_gradients_are_not_clipped_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = OwnList(model.parameters(), 1e-2)
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).mean(), policy=policy("master"), clip_norm=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=re.escape("changes the low weight weight from a list of its own")):
        step(torch.ones(2, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_it_is_given_unscaled_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = OwnList(model.parameters(), 1e-5)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=policy("master", "fp16"))
    scaler.scale(model(torch.ones(4, 64)).mean()).backward()
    before = model.state_dict()["weight"].clone()
    scaler.step(optimizer)
    assert float((before - model.state_dict()["weight"]).mean()) == pytest.approx(1e-5, rel=0.05)
    assert model.weight.grad is not None and float(model.weight.grad.abs().max()) < 1


class Interrupted(torch.optim.SGD):
    """SGD whose step ends before parameter number `cut`."""

    cut: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if number == self.cut:
                raise KeyboardInterrupt
            p.add_(p.grad, alpha=-0.1)


def trainer(master: str) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = Interrupted(model.parameters(), lr=0.1)
    return hs.TrainStep(model, optimizer, lambda m, x, y: F.cross_entropy(m(x), y), policy=policy(master))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 6, generator=generator), torch.arange(8) % 3) for _ in range(5)]


@pytest.mark.parametrize("master", ["split", "kahan", "stochastic"])
def test_an_interrupt_that_is_kept_keeps_no_half_of_an_update(master: str, tmp_path: Path) -> None:
    whole, cut = trainer(master), trainer(master)
    for batch in batches()[:2]:
        whole(*batch), cut(*batch)
    cut.optimizer.cut = 2  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt) as kept:  # its traceback refers to the fp32 values of the step
        cut(*batches()[2])
    wanted = whole.state_dict()["model"]
    assert all(torch.equal(value, wanted[name]) for name, value in cut.state_dict()["model"].items())
    hs.save(cut, tmp_path)
    cut.optimizer.cut = None  # type: ignore[attr-defined]
    hs.load(cut, tmp_path)
    for batch in batches()[2:]:
        whole(*batch), cut(*batch)
    wanted = whole.state_dict()["model"]
    assert all(torch.equal(value, wanted[name]) for name, value in cut.state_dict()["model"].items())
    assert kept.tb is not None


@pytest.mark.parametrize("master", ["kahan", "stochastic", "split"])
def test_an_optimizer_that_refers_to_fp32_values_saves_what_the_model_has(master: str) -> None:
    class Caching(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.cached = getattr(self, "cached", None) or [p for g in self.param_groups for p in g["params"]]
            for p in self.cached:
                p.sub_(0.001 * p.grad)

    torch.manual_seed(0)
    model: Any = nn.Linear(16, 16)
    optimizer = Caching(model.parameters(), lr=0.1)
    hs.prepare(model, optimizer, policy=policy(master))
    for _ in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = model.state_dict()
        twin = hs.prepare(nn.Linear(16, 16), policy=policy(master))
        twin.load_state_dict(saved)
        assert torch.equal(Tensor.detach(twin.weight), Tensor.detach(model.weight))
        assert torch.equal(twin.state_dict()["weight"], saved["weight"])
