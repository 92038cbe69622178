"""TrainStep and torch's fused optimizers: taken where only speed changes, right in first and in resumed steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import halfstep as hs
from halfstep.update import optimizer_step

FORMS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p, **k: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **k),
    "adam": lambda p, **k: Adam(p, lr=0.1, **k),
    "adamw": lambda p, **k: AdamW(p, lr=0.1, **k),
    "adagrad": lambda p, **k: Adagrad(p, lr=0.1, **k),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 4, generator=generator) for _ in range(count)]


def assert_close(a: nn.Module, b: nn.Module) -> None:
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-6)


class Plain(SGD):
    """A subclass whose step is its own and knows nothing of scales."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("policy", ["mixed", "O2"])
def test_a_subclass_with_a_step_of_its_own_gets_unscaled_gradients(policy: str) -> None:
    model = nn.Linear(4, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = Plain(model.parameters(), lr=1.0)
    step = hs.TrainStep(
        model, optimizer, lambda m, x: m(x).sum(), policy=hs.Policy.of(policy, dtype="fp16", scale=64.0)
    )
    step(torch.ones(1, 4))
    assert torch.allclose(model.state_dict()["weight"], start - 1.0, atol=1e-3)
    assert step.host_reads == 1  # nobody but the host can skip for it


@pytest.mark.parametrize("policy", ["O0", "O2"])
def test_a_parameter_whose_first_gradient_comes_late_gets_its_momentum(policy: str) -> None:
    def train(make: Callable[[nn.Module, Optimizer], Callable[[Tensor], object]]) -> nn.Module:
        model = net()
        optimizer = FORMS["sgd"](model.parameters())
        run = make(model, optimizer)
        model[0].requires_grad_(False)
        for i, x in enumerate(batches(5)):
            if i == 2:
                model[0].requires_grad_(True)
            run(x)
        return model

    def by_hand(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], object]:
        def run(x: Tensor) -> None:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()

        return run

    chosen = hs.Policy.of(policy) if policy == "O0" else hs.Policy.of(policy, dtype="bf16")
    got = train(lambda model, optimizer: hs.TrainStep(model, optimizer, loss, policy=chosen))
    if policy == "O0":
        assert_close(got, train(by_hand))
    else:
        assert all(torch.isfinite(value).all() for value in got.state_dict().values())


@pytest.mark.parametrize("policy", ["mixed", "O2"])
def test_momentum_needs_no_read_by_the_host_not_even_in_a_bad_first_step(policy: str) -> None:
    model, twin = net(), net()
    chosen = hs.Policy.of(policy, dtype="bf16")
    step, good = (hs.TrainStep(m, FORMS["sgd"](m.parameters()), loss, policy=chosen) for m in (model, twin))
    assert bool(step(torch.full((16, 4), float("nan"))).skipped)
    for x in batches(3):
        step(x)
        good(x)
    assert step.host_reads == good.host_reads == 0
    for left, right in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_dampening_stays_with_torchs_own_form() -> None:
    model, twin = net(), net()
    step = hs.TrainStep(model, SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5), loss, policy="O0")
    optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    for x in batches(3):
        step(x)
        optimizer.zero_grad()
        loss(twin, x).backward()
        optimizer.step()
    assert_close(model, twin)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("through", ["the optimizer", "the step"])
def test_a_run_without_halfstep_is_resumed(name: str, through: str) -> None:
    whole, first = net(), net()
    optimizer, early = FORMS[name](whole.parameters()), FORMS[name](first.parameters())
    xs = batches(4)
    for i, x in enumerate(xs):
        for model, mover in ((whole, optimizer), (first, early)):
            if model is whole or i < 2:
                mover.zero_grad()
                loss(model, x).backward()
                mover.step()
    saved = copy.deepcopy(early.state_dict())
    model = copy.deepcopy(first)
    resumed = FORMS[name](model.parameters())
    if through == "the optimizer":
        step = hs.TrainStep(model, resumed, loss, policy="O0")
        resumed.load_state_dict(saved)
    else:
        resumed.load_state_dict(saved)
        step = hs.TrainStep(model, resumed, loss, policy="O0")
    for x in xs[2:]:
        step(x)
    assert_close(model, whole)
    fused = optimizer_step.takes_predicate(resumed)
    assert fused is (through == "the optimizer")  # what has stepped keeps the form it stepped in


def test_one_scale_serves_a_window_whatever_others_do_to_it() -> None:
    model = nn.Linear(4, 1, bias=False)
    start = model.weight.detach().clone()
    scaler = hs.GradScaler("cpu", init_scale=1024.0)
    step = hs.TrainStep(
        model,
        SGD(model.parameters(), lr=1.0),
        lambda m, x: m(x).sum(),
        policy=hs.Policy.of("mixed", dtype="fp16"),
        accumulate=2,
        scaler=scaler,
    )
    first = step(torch.ones(1, 4))
    scaler.update(new_scale=512.0)
    second = step(torch.ones(1, 4))
    assert float(first.scale) == float(second.scale) == 1024.0
    assert torch.allclose(model.weight.detach(), start - 1.0, atol=1e-3)
    third = step(torch.ones(1, 4))
    assert float(third.scale) == 512.0
    assert float(step.flush().scale) == 512.0  # type: ignore[union-attr]
    assert torch.allclose(model.weight.detach(), start - 2.0, atol=1e-3)
