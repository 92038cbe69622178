"""Which optimizers may be fused, and that fused steps do what the others do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()  # type: ignore[no-any-return]


def test_a_subclass_with_a_step_of_its_own_gets_plain_gradients() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(p.grad, alpha=-group["lr"])

    model = nn.Linear(4, 1, bias=False)
    chosen = hs.Policy.of("mixed", dtype="fp16", scale=1024.0)
    step = hs.TrainStep(model, Mine(model.parameters(), lr=1.0), total, policy=chosen)
    before = model.weight.detach().clone()
    step(torch.ones(1, 4))
    assert torch.equal(model.weight, before - 1.0)


def test_momentum_of_a_parameter_whose_first_gradient_comes_late() -> None:
    """Fused SGD of torch makes momentum for all parameters at once and fails if some have none."""

    def train(*, fused: bool, nesterov: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov, foreach=None if fused else False
        )
        step = hs.TrainStep(model, optimizer, total, policy="O0")
        for i in range(4):
            if i == 2:
                model[0].requires_grad_(True)
            step(torch.ones(2, 8))
        assert step.host_reads == (0 if fused else 4)
        return [p.detach() for p in model.parameters()]

    for nesterov in (False, True):
        pairs = zip(train(fused=True, nesterov=nesterov), train(fused=False, nesterov=nesterov), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in pairs)


def test_momentum_with_dampening_is_not_fused() -> None:
    """Its first step is not damped, so momentum that begins at zero would not do."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    hs.TrainStep(model, optimizer, total, policy="O0")(torch.ones(1, 2))
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("name", ["O0", "O2"])
def test_the_state_of_an_optimizer_that_was_not_fused_goes_on(kind: Any, name: str) -> None:
    def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        return model, kind(model.parameters(), lr=0.1)

    model, optimizer = plain()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    model, other = plain()
    step = hs.TrainStep(
        model, other, total, policy=hs.Policy.of(name) if name == "O0" else hs.Policy.of(name, dtype="bf16")
    )
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(torch.ones(2, 8))
    assert step.host_reads == 0 and other.param_groups[0]["fused"]


def test_a_loaded_choice_of_form_is_kept() -> None:
    model = nn.Linear(8, 4)
    chosen = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer = torch.optim.AdamW(model.parameters())
    step = hs.TrainStep(model, optimizer, total, policy="O0")
    optimizer.load_state_dict(chosen.state_dict())
    step(torch.ones(2, 8))
    assert step.host_reads == 1 and optimizer.param_groups[0]["foreach"] is True


@pytest.mark.parametrize(("kind", "fused"), [(torch.optim.AdamW, True), (torch.optim.SGD, None)])
def test_low_parameters_without_masters_are_stepped_by_a_fused_form_that_works(kind: Any, fused: bool | None) -> None:
    """Of a low parameter, torch's fused SGD for CPUs moves the last few elements only."""
    model = nn.Linear(8, 4)
    step = hs.TrainStep(model, kind(model.parameters(), lr=0.1), total, policy=hs.Policy.of("O3", dtype="bf16"))
    before = model.weight.detach().float()
    for _ in range(2):
        step(torch.ones(2, 8))
    assert model.weight.dtype is torch.bfloat16 and (model.weight.float() != before).all()
    assert step.optimizer.param_groups[0]["fused"] is fused and step.host_reads == (0 if fused else 2)
