"""A prepared model and its process: types stay, and what prepare has added is gone after `hs.unprepare`."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import halfstep as hs
from halfstep.binding.precise import KEY
from halfstep.errors import BindError
from halfstep.kernels import pages
from halfstep.weights import attachment, states
from halfstep.weights.attachment import CALLS, USERS, Turn, at_each_step

FORMS = [("mixed", "auto"), ("O2", "master"), ("O2", "split"), ("pure", "stochastic"), ("lean", "auto"), ("O3", "none")]
every_form = pytest.mark.parametrize(("name", "master"), FORMS)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def policy(name: str, master: str = "auto") -> hs.Policy:
    return hs.Policy.of(name, dtype="bf16", master=master)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.ReLU()
        self.head = nn.Linear(12, 2)

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.act(self.norm(self.conv(x.unsqueeze(1)))).flatten(1)
        return code

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.encode(x))
        return made


def traces(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return what preparing may leave in a model, an optimizer of it and the process."""
    hooks = [value for name, value in vars(optimizer).items() if name.endswith("_hooks")] if optimizer else []
    return {
        "types": [type(module) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "parameters": [type(parameter) for parameter in model.parameters()],
        "hooks": [list(optimizers._global_optimizer_pre_hooks), list(optimizers._global_optimizer_post_hooks)],
        "hooks of the optimizer": sum(map(len, hooks)),
        "malloc": len(pages._users),
    }


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def trained(name: str, master: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a prepared model and its optimizer after one update."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hs.prepare(model, optimizer, policy=policy(name, master))
    model(X).float().mean().backward()
    optimizer.step()
    return model, optimizer


@every_form
def test_after_unprepare_nothing_is_left(name: str, master: str) -> None:
    with without_collector():
        before = traces(Net())
        model, optimizer = trained(name, master)
        hs.unprepare(model)
        assert traces(model, optimizer) == before


@every_form
def test_when_the_model_is_gone_nothing_is_left(name: str, master: str) -> None:
    with without_collector():
        before = traces(Net())
        trained(name, master)
        assert traces(Net()) == before


def test_hooks_that_stay_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the two laws above."""
    gc.collect()
    before, users = traces(Net()), set(USERS)
    end = attachment.not_at_each_step
    monkeypatch.setattr(attachment, "not_at_each_step", lambda turn, user: None)
    monkeypatch.setattr(states, "not_at_each_step", lambda turn, user: None)
    model = hs.unprepare(trained("O2", "master")[0])
    assert USERS > users and (users or traces(model) != before)
    monkeypatch.undo()
    for user in USERS - users:
        end(*user)
    assert traces(model) == before and USERS == users


def test_calls_before_a_step_have_an_order() -> None:
    class User:
        pass

    made, users = list[str](), [User(), User()]
    kept = dict(CALLS)
    try:
        at_each_step(Turn.CHECK, users[0], lambda _: made.append("check"))
        at_each_step(Turn.ATTACH, users[1], lambda _: made.append("attach"))
        parameter = nn.Parameter(torch.ones(1))
        torch.optim.SGD([parameter], lr=0.1).step()
    finally:
        users.clear()
        CALLS.update(kept)
    assert made == ["attach", "check"]


# ------------------------------------------------------------------ types


@every_form
def test_every_module_keeps_its_class(name: str, master: str) -> None:
    model = Net()
    kinds = [type(module) for module in model.modules()]
    hs.prepare(model, policy=policy(name, master))
    assert [type(module) for module in model.modules()] == kinds
    assert [type(module) for module in copy.deepcopy(model).modules()] == kinds


@torch.no_grad()
def fill(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        module.weight.fill_(1.0)


@every_form
def test_the_example_of_module_apply_initialises(name: str, master: str) -> None:
    model = hs.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), policy=policy(name, master))
    model.apply(fill)
    assert all((value == 1).all() for key, value in model.state_dict().items() if key.endswith("weight"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_tools_find_layers_by_their_class() -> None:
    model = hs.prepare(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()), policy=policy("mixed")).eval()
    fused = torch.ao.quantization.fuse_modules(model, [["0", "1"]])
    assert type(fused[1]) is nn.Identity
    image = torch.randn(1, 1, 8, 8)
    assert torch.allclose(fused(image), model(image), atol=0.05)


# ------------------------------------------------------------------ note [instance methods] of binding/bind.py


def test_a_method_whose_model_is_gone_says_so() -> None:
    model = hs.prepare(Net(), policy=policy("mixed"))
    forward, encode = model.forward, model.encode
    want = encode(X)
    assert torch.equal(forward(X), model(X))
    del model
    for method in (forward, encode):
        with pytest.raises(BindError, match="keep a reference to the model"):
            method(X)
    held = copy.deepcopy(hs.prepare(Net(), policy=policy("mixed"))).encode
    assert want.dtype is torch.float32 and held.__name__ == "encode"


def test_a_copied_method_keeps_its_copy_alive() -> None:
    model = hs.prepare(Net(), policy=policy("O2"))
    method, want = copy.deepcopy(model.encode), model.encode(X)
    assert torch.equal(method(X), want) and method.__self__ is not model.encode.__self__  # type: ignore[attr-defined]


def test_the_replica_of_dataparallel_runs_its_own_forward() -> None:
    model = hs.prepare(nn.Linear(8, 8), policy=policy("mixed"))
    replica: Any = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(8, 8), torch.ones(8)
    assert torch.equal(replica(X), torch.ones(4, 8)) and not torch.equal(model(X), torch.ones(4, 8))


def test_a_dict_that_was_copied_by_hand_is_bound_when_the_copy_is_prepared() -> None:
    class Copied(nn.Linear):
        def __copy__(self) -> Copied:
            twin = Copied.__new__(Copied)
            twin.__dict__.update(self.__dict__)
            twin._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in self.named_parameters()}
            return twin

    model = hs.prepare(Copied(8, 8), policy=policy("mixed"))
    twin = copy.copy(model)
    assert hs.prepared_policy(twin) is None
    hs.prepare(twin, policy=policy("mixed"))
    assert not twin(X).any() and model(X).any()


def test_the_function_of_a_bound_forward_takes_the_module_too() -> None:
    """Accelerate binds ``model.forward.__func__`` to the model."""
    model = hs.prepare(Net(), policy=policy("mixed"))
    want = model(X)
    model.forward = types.MethodType(cast(Any, model.forward).__func__, model)  # type: ignore[method-assign]
    assert torch.equal(model(X), want)
    hs.unprepare(model)
    assert KEY not in vars(model)


def test_a_method_that_was_read_before_runs_plain_after_unprepare() -> None:
    model = hs.prepare(Net(), policy=policy("mixed"))
    forward = model.forward
    hs.unprepare(model)
    assert torch.equal(forward(X), model(X)) and torch.equal(model(X), Net.forward(model, X))
