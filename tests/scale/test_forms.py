"""An optimizer whose fused kernel does not do its work steps by another form, whoever calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat import torch_amp
from halfstep.scale.forms import keep_working_form, use_working_form

LOW = (torch.float16, torch.bfloat16)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def trained(front_end: str, dtype: torch.dtype, fused: bool, momentum: float) -> Tensor:
    """Return the weight of a model in `dtype` after three steps of a user's SGD."""
    torch.manual_seed(0)
    model, x = nn.Linear(24, 24).to(dtype), torch.randn(8, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum, fused=fused or None)
    policy: Any = hs.Policy.of("O3", dtype="fp16" if dtype is torch.float16 else "bf16")
    if front_end == "TrainStep":
        step = hs.TrainStep(model, optimizer, loss_of, policy=policy)
        for _ in range(3):
            step(x)
        return model.weight.detach().float()
    scaler: Any = torch_amp.GradScaler("cpu", init_scale=4.0, enabled=front_end != "disabled scaler")
    if front_end == "prepare":
        hs.prepare(model, optimizer, policy=policy)
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": [
            {**group, "fused": fused or None} for group in optimizer.state_dict()["param_groups"]
        ]})  # fmt: skip
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, x if front_end == "prepare" else x.to(dtype))
        if front_end == "prepare":
            torch.autograd.backward(loss)
            optimizer.step()
        else:
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
    return model.weight.detach().float()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("front_end", ["TrainStep", "prepare", "scaler", "disabled scaler"])
def test_a_users_fused_sgd_moves_low_parameters(front_end: str, dtype: torch.dtype, momentum: float) -> None:
    fused, usual = (trained(front_end, dtype, choice, momentum) for choice in (True, False))
    assert torch.equal(fused, usual)


def test_precise_weights_keep_the_form_of_their_optimizer() -> None:
    model = nn.Linear(24, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    hs.prepare(model, optimizer, policy=hs.Policy.of("O2", dtype="bf16"))
    assert optimizer.param_groups[0]["fused"] and not use_working_form(optimizer)


def test_only_groups_that_need_it_change() -> None:
    wide, low = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([{"params": [wide]}, {"params": [low]}], lr=0.5, fused=True)
    assert use_working_form(optimizer) and [group["fused"] for group in optimizer.param_groups] == [True, None]
    assert not use_working_form(optimizer) and not use_working_form(torch.optim.RMSprop([low]))
    adam = torch.optim.Adam([low], fused=True)
    keep_working_form(adam, [low])
    assert adam.param_groups[0]["fused"] is True


def test_a_parameter_with_gaps_is_stepped_right() -> None:
    """Under the front-end that would choose the fused form by itself, and under one where the user did."""
    starts = torch.linspace(-1.0, 1.0, 48).reshape(4, 12)

    def weights(**form: Any) -> Tensor:
        model: Any = nn.Module()
        model.weight = nn.Parameter(starts.clone()[:, ::2])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **form)

        def loss(m: Any, x: Tensor) -> Tensor:
            total: Tensor = (m.weight * x).square().sum()
            return total

        step = hs.TrainStep(model, optimizer, loss, policy="O0")
        for _ in range(3):
            step(torch.arange(24.0).reshape(4, 6))
        result: Tensor = model.weight.detach()
        return result

    usual = weights(foreach=False)
    assert torch.allclose(weights(), usual, atol=1e-6) and torch.allclose(weights(fused=True), usual, atol=1e-6)
