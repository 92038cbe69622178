"""What is written into the tensors of a ``state_dict()`` is written into the weights, as in a plain model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

OTHER = 0.3 + torch.arange(24.0).reshape(4, 6) / 7
WAYS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "copy_": lambda state: state["0.weight"].copy_(OTHER),
    "mul_ and add_": lambda state: state["0.weight"].mul_(0.9).add_(OTHER, alpha=1e-4),
    "lerp_ of all": lambda state: [value.lerp_(torch.ones_like(value), 1e-3) for value in state.values()],
    "an item": lambda state: state["0.weight"].__setitem__((0, slice(1, 3)), 0.123),
    "a row": lambda state: state["0.weight"][2].fill_(0.3337),
    "a view": lambda state: state["0.weight"].view(-1).mul_(1.001),
    "the transpose": lambda state: state["0.weight"].t().sub_(OTHER.t()),
    "data": lambda state: state["0.weight"].data.mul_(1.001),
    "detach": lambda state: state["0.weight"].detach().mul_(1.001),
    "out=": lambda state: torch.mul(state["0.weight"], 1.001, out=state["0.weight"]),
    "foreach": lambda state: torch._foreach_mul_([*state.values()], 1.001),
    "one value from another": lambda state: state["0.weight"].copy_(state["0.weight"].flip(0)),
}


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def prepared(name: str) -> tuple[Any, torch.optim.Optimizer]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hs.prepare(model, optimizer, policy=hs.Policy.of(name, dtype="bf16", master="split" if name == "pure" else "auto"))
    return model, optimizer


def augmented(state: dict[str, Tensor]) -> None:
    state["0.weight"] *= 0.9
    state["0.weight"] += OTHER


@pytest.mark.parametrize("name", ["O2", "pure"])
@pytest.mark.parametrize("way", [*WAYS.values(), augmented], ids=[*WAYS, "*= and +="])
def test_a_write_into_a_state_dict_is_a_write_into_the_weights(name: str, way: Callable[[Any], Any]) -> None:
    model, plain = prepared(name)[0], small()
    with torch.no_grad():
        way(model.state_dict())
        way(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    for low, value in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(low.as_subclass(Tensor), value.bfloat16())


def test_a_write_begins_with_the_weight_of_that_moment() -> None:
    model, optimizer = prepared("O2")
    kept = model.state_dict()["0.weight"]
    model(torch.ones(3, 6)).float().square().sum().backward()
    optimizer.step()
    now = model.state_dict()["0.weight"].clone()
    assert not torch.equal(kept, now)
    kept.mul_(0.5)
    assert torch.equal(model.state_dict()["0.weight"], now * 0.5)


def test_what_is_read_from_a_state_dict_is_a_plain_tensor() -> None:
    state = prepared("O2")[0].state_dict()
    value = state["0.weight"]
    for made in (value + 1, value.clone(), value.double(), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(made) is Tensor
    assert type(nn.Parameter(value)) is nn.Parameter and type(nn.Parameter(value.clone())) is nn.Parameter
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(loaded[key]) is Tensor and torch.equal(loaded[key], state[key]) for key in state)
    other = small()
    other.load_state_dict(state)
    assert all(torch.equal(other.state_dict()[key], state[key]) for key in state)


def test_a_copy_of_a_state_dict_is_the_users_own() -> None:
    model, _ = prepared("O2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    mine = copy.deepcopy(model.state_dict())
    for value in mine.values():
        value.zero_()
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


def test_an_average_of_a_copied_model_is_kept_by_its_state_dict() -> None:
    """The loop of YOLO's ModelEMA."""
    model, _ = prepared("O2")
    average, exact = copy.deepcopy(model), {key: value.double() for key, value in model.state_dict().items()}
    for _ in range(20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-2)
            for key, value in average.state_dict().items():
                value *= 0.99
                value += 0.01 * model.state_dict()[key].detach()
        exact = {key: 0.99 * value + 0.01 * model.state_dict()[key].double() for key, value in exact.items()}
    assert all(torch.allclose(average.state_dict()[key].double(), exact[key], atol=1e-6, rtol=0) for key in exact)


def test_a_state_dict_outlives_the_preparation() -> None:
    model, _ = prepared("O2")
    state = model.state_dict()
    hs.unprepare(model)
    with torch.no_grad():
        state["0.weight"].fill_(0.125)
    assert bool((model[0].weight == 0.125).all()) and type(model[0].weight) is nn.Parameter
