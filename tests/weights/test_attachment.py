"""Closures see the model as it is and the optimizer what it would see in fp32; wrappers out of reach are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.weights import STRATEGIES
from tests.weights.small import EVERY

Make = Callable[[Any], Optimizer]


class Sam(Optimizer):
    """Sharpness-aware minimisation as it is commonly written: a second gradient at weights that were moved."""

    def __init__(self, params: Any, *, hidden: bool) -> None:
        super().__init__(params, {"rho": 0.05, "lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.hidden = hidden  # writes that torch does not count

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            (p.data if self.hidden else p).add_(p.grad, alpha=0.05 / float(norm))
        self.zero_grad(set_to_none=self.hidden)
        with torch.enable_grad():
            loss = closure()
        for p, value in zip(parameters, before, strict=True):
            p.data = value
        self.base.step()
        return loss


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def train(policy: hs.Policy | str, make: Make, *, closed: bool, steps: int = 4) -> tuple[dict[str, Tensor], list[Any]]:
    """Train by plain steps or by closures; return fp32 weights and what `step` returned, or was called with."""
    model, seen = net(), []
    optimizer = make(model.parameters())
    hs.prepare(model, optimizer, policy=policy)

    for i in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))

        def closure(x: Tensor = x) -> Any:
            optimizer.zero_grad()
            assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
            loss: Tensor = model(x).float().square().mean()
            loss.backward()
            seen.append(loss.item())
            return loss

        if isinstance(optimizer, Sam) or not closed:
            closure()
        if closed:
            returned: Any = optimizer.step(closure)
            assert returned.item() == seen[-1]
        else:
            optimizer.step()
    return model.state_dict(), seen


@pytest.mark.parametrize("master", STRATEGIES)
@pytest.mark.parametrize("name", ["adamw-fused", "adam-foreach", "sgd", "rmsprop", "adafactor"])
def test_a_closure_runs_once_and_gives_the_weights_of_a_plain_step(name: str, master: Any) -> None:
    policy = hs.Policy.of("O2", dtype="bf16", master=master)
    wanted, plain = train(policy, EVERY[name], closed=False)
    got, closed = train(policy, EVERY[name], closed=True)
    assert plain == closed and len(closed) == 4
    assert all(torch.equal(got[k], wanted[k]) for k in wanted)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("master", ["master", "split"])
def test_a_second_evaluation_is_made_where_the_optimizer_has_moved_the_weights(master: Any, hidden: bool) -> None:
    """Bit-equal to fp32 weights that operators round, which is what low weights in front of fp32 ones are."""
    rules = hs.Policy.of("O2", dtype="bf16", master=master)
    got, losses = train(rules, lambda p: Sam(p, hidden=hidden), closed=True)
    wanted, reference = train("O0", lambda p: Sam(p, hidden=hidden), closed=True)
    first, second = losses[0::2], losses[1::2]
    assert all(b > a for a, b in zip(first, second, strict=True))  # the ascent is seen
    for k in wanted:
        assert torch.allclose(got[k], wanted[k], atol=2e-3), k
    assert losses == pytest.approx(reference, rel=0.02)


def test_two_prepared_models_under_one_optimizer_and_a_closure() -> None:
    def run(*, closed: bool) -> list[Tensor]:
        first, second = net(), net()
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 1e-2)
        policy = hs.Policy.of("O2", dtype="bf16")
        hs.prepare(first, policy=policy)
        hs.prepare(second, policy=policy)
        calls: list[None] = []
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

        def closure() -> Any:
            calls.append(optimizer.zero_grad())
            loss = (first(x) - 2 * second(x)).float().square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            _ = optimizer.step(closure) if closed else (closure(), optimizer.step())
        assert len(calls) == 3
        return [*first.state_dict().values(), *second.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(run(closed=True), run(closed=False), strict=True))


def test_a_closure_that_raises_leaves_everything_and_training_goes_on() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    hs.prepare(model, optimizer, policy=hs.Policy.of("O2", dtype="bf16"))
    before = model.state_dict()

    def broken() -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(broken)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model(torch.randn(4, 8)).float().sum().backward()
    optimizer.step()
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


def test_lbfgs_is_refused_before_its_closure_runs() -> None:
    class Searching(torch.optim.LBFGS):
        pass

    for kind in (torch.optim.LBFGS, Searching):
        model = net()
        optimizer = kind(model.parameters())
        hs.prepare(model, optimizer, policy=hs.Policy.of("O2", dtype="bf16"))
        with pytest.raises(hs.HalfstepError, match=rf"{kind.__name__}.*params='fp32'"):
            optimizer.step(lambda: pytest.fail("it ran"))


class Nested(Optimizer):
    """Steps through an optimizer with parameter groups of its own."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.inner = torch.optim.SGD(params, 0.1)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Hookless(Optimizer):
    """Does not call torch's ``__init__``."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize("prepared", [True, False])
def test_an_optimizer_that_passes_by_the_masters_is_refused_at_its_first_step(prepared: bool) -> None:
    model: Any = net()
    optimizer = Nested(model.parameters())
    hs.prepare(model, *([optimizer] if prepared else []), policy=hs.Policy.of("O2", dtype="bf16"))
    before = model.state_dict()
    for _ in range(2):
        model(torch.randn(4, 8)).float().sum().backward()
        with pytest.raises(hs.HalfstepError, match=r"Nested steps low weights through SGD.*'mixed'"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_an_optimizer_without_hooks_is_refused_and_the_one_inside_it_steps_masters() -> None:
    model: Any = net()
    inner = torch.optim.SGD(model.parameters(), 1e-4)
    outer = Hookless(inner)
    with pytest.raises(hs.HalfstepError, match=r"Hookless has no _optimizer_step_pre_hooks.*the optimizer in it"):
        hs.prepare(model, outer, policy=hs.Policy.of("O2", dtype="bf16"))
    assert hs.prepared_policy(model) is None and model[0].weight.dtype is torch.float32
    hs.prepare(model, inner, policy=hs.Policy.of("O2", dtype="bf16"))
    before, low = model.state_dict()["2.weight"], Tensor.detach(model[2].weight).clone()
    model(torch.randn(4, 8)).float().sum().backward()
    outer.step()
    assert not torch.equal(model.state_dict()["2.weight"], before)
    assert bool((Tensor.detach(model[2].weight) == low).any())  # what moved is less than bf16 can show
