"""Frozen low parameters: nothing is kept behind them until they are trained, and what is written to them stays."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.binding.prepare import store_of
from halfstep.weights import WeightStore

STRATEGIES = ["master", "split", "kahan", "stochastic"]
KEPT = {"master": 4, "split": 2, "kahan": 2, "stochastic": 0}


def net() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


def pure(master: str = "master", **fields: Any) -> hs.Policy:
    return hs.Policy.of("pure", dtype="bf16", master=master, **fields)


def prepared(master: str = "master", **fields: Any) -> tuple[Any, Any, hs.GradScaler]:
    model = net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return hs.prepare(model, optimizer, policy=pure(master, **fields))


def behind(model: nn.Module) -> WeightStore:
    store = store_of(model)
    assert store is not None
    return store


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 8, generator=data)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("master", STRATEGIES)
def test_only_what_is_trained_has_something_behind_it(master: str) -> None:
    model, optimizer, _ = prepared(master)
    frozen, trained = sum(p.numel() for p in model[0].parameters()), sum(p.numel() for p in model[2].parameters())
    for _ in range(2):
        assert sum(p.nbytes for p in model.parameters()) == 2 * (frozen + trained)
        assert sum(t.nbytes for t in behind(model).kept()) == KEPT[master] * trained
        train(model, optimizer)
        model.state_dict(), copy.deepcopy(model), pickle.dumps(model), optimizer.state_dict()
        with hs.edit_weights(model):
            pass


def test_a_parameter_that_an_optimizer_has_keeps_its_fp32_value() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model[0].weight.detach().clone()
    hs.prepare(model, optimizer, policy=pure())
    assert torch.equal(model.state_dict()["0.weight"], weight)


def test_its_state_is_the_rounded_value_in_the_low_format_and_loads_back() -> None:
    weight = net()[0].weight.detach()
    model, _, _ = prepared()
    state = model.state_dict()
    assert state["0.weight"].dtype is torch.bfloat16 and state["2.weight"].dtype is torch.float32
    assert torch.equal(state["0.weight"], weight.bfloat16())
    other, _, _ = prepared()
    other.load_state_dict({name: 2 * value for name, value in state.items()})
    assert torch.equal(other[0].weight, 2 * state["0.weight"])
    other.load_state_dict(net().state_dict())  # fp32: rounded as by prepare
    assert torch.equal(other[0].weight, state["0.weight"]) and behind(other).is_frozen(other[0].weight)
    plain = net()
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, weight.bfloat16().float())
    hs.unprepare(model)
    assert torch.equal(model[0].weight, weight.bfloat16().float()) and type(model[0].weight) is nn.Parameter


def test_a_value_beyond_the_format_is_refused_when_it_is_loaded() -> None:
    model = net()
    hs.prepare(model, policy=hs.Policy.of("pure", dtype="fp16"))
    state = {name: value.float() for name, value in model.state_dict().items()}
    state["0.weight"][0, 0] = 1e6
    before = model[2].weight.detach().clone()
    with pytest.raises(hs.errors.WeightsError, match=r"0\.weight holds a weight of magnitude 1000000"):
        model.load_state_dict({**state, "2.weight": state["2.weight"] + 1})
    assert torch.equal(model[2].weight, before)


@pytest.mark.parametrize("master", STRATEGIES)
@pytest.mark.parametrize("by", ["add_param_group", "TrainStep"])
def test_trained_later_it_gets_an_fp32_value_that_begins_as_the_low_one(master: str, by: str) -> None:
    model, optimizer, _ = prepared(master)
    train(model, optimizer)
    low = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    data = torch.randn(4, 8)
    if by == "TrainStep":
        every = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = hs.TrainStep(model, every, lambda m, x: m(x).square().sum(), policy=pure(master))
        step(data)
    else:
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        model(data).square().sum().backward()
        gradient = model[0].weight.grad.float()
        optimizer.step()
        assert gradient.any()
        if master in {"master", "split"}:
            assert torch.equal(model.state_dict()["0.weight"], low.float() - 1e-3 * gradient)
    assert not behind(model).is_frozen(model[0].weight)
    precise = model.state_dict()["0.weight"]
    assert precise.dtype is torch.float32 and not torch.equal(precise, low.float())
    count = sum(p.numel() for p in model.parameters())
    assert sum(t.nbytes for t in behind(model).kept()) == KEPT[master] * count


def test_gradients_in_fp32_and_large_frozen_parameters_go_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1 << 14), nn.Linear(1 << 14, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    policy = pure(grads="fp32")
    step = hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy, accumulate=2)
    for _ in range(4):
        step(torch.randn(4, 8))
    assert sum(t.nbytes for t in behind(model).kept()) == 4 * sum(p.numel() for p in model[1].parameters())


@pytest.mark.parametrize("master", STRATEGIES)
def test_a_checkpoint_goes_on_bit_for_bit(master: str, tmp_path: Path) -> None:
    def begin() -> Any:
        model = net()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return hs.TrainStep(model, optimizer, lambda m, x: m(x).square().sum(), policy=pure(master))

    data = torch.randn(6, 4, 8)
    whole, first, second = begin(), begin(), begin()
    for x in data:
        whole(x)
    for x in data[:3]:
        first(x)
    hs.save(first, tmp_path)
    with torch.no_grad():
        second.model[0].weight.zero_()
    hs.load(second, tmp_path)
    for x in data[3:]:
        second(x)
    found, wanted = second.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(found[name], value) and found[name].dtype is value.dtype for name, value in wanted.items())


@pytest.mark.parametrize("master", ["master", "split", "kahan"])
def test_a_frozen_weight_that_is_moved_gets_an_fp32_value(master: str) -> None:
    """As a teacher is moved, a bias that no optimizer has, or an adapter that is merged."""
    model, _, _ = prepared(master)
    weight = model[0].weight
    wanted = Tensor.detach(weight).float()
    for _ in range(50):
        weight.data += 1e-4
        wanted += 1e-4
    assert not behind(model).is_frozen(weight) and not weight.requires_grad
    assert torch.allclose(model.state_dict()["0.weight"], wanted, rtol=2.0**-12, atol=0)
    assert torch.equal(Tensor.detach(weight), model.state_dict()["0.weight"].bfloat16())
    frozen = sum(p.numel() for p in (*model[2].parameters(), weight))
    assert sum(t.nbytes for t in behind(model).kept()) == KEPT[master] * frozen  # the bias beside it stays as it is


def test_another_format_device_and_back_leave_it_what_it_is() -> None:
    model, optimizer, _ = prepared()
    low = model[0].weight.detach().clone()
    model.float()
    assert model[0].weight.dtype is torch.float32 and torch.equal(model[0].weight, low.float())
    model.bfloat16()
    assert torch.equal(model[0].weight, low)
    train(model, optimizer)
    assert torch.equal(model[0].weight, low)


@pytest.mark.parametrize("write", ["+=", "in place", "new"])
def test_every_write_through_data_reaches_the_fp32_value(write: str) -> None:
    model: Any = nn.Linear(4, 4)
    hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=pure())
    before = model.state_dict()["weight"]
    if write == "+=":
        model.weight.data += 1e-4
    elif write == "in place":
        model.weight.data.add_(1e-4)
    else:
        model.weight.data = model.weight.data + 1e-4
    assert model.weight.dtype is torch.bfloat16 and torch.equal(model.state_dict()["weight"], before + 1e-4)


def test_what_cannot_be_lowered_is_refused_before_anything_changes() -> None:
    model = net()
    model[0].weight.data = model[0].weight.data.half()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(hs.errors.WeightsError, match=r"parameter 0\.weight is torch\.float16"):
        hs.prepare(model, policy=pure())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[2].weight.dtype is torch.float32 and store_of(model) is None
