"""Modules without state that serve several models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.cast.state import STATE
from halfstep.errors import BindError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
POLICIES = ["O0", "torch", "mixed", "O1", "O2", "pure", "O3"]


def policy(name: str) -> hs.Policy:
    return hs.Policy.of(name) if name == "O0" else hs.Policy.of(name, dtype="bf16")


class Records(nn.Module):
    """An activation that notes the format it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return torch.nn.functional.softmax(x, -1)


def twins(activation: nn.Module) -> tuple[nn.Sequential, nn.Sequential]:
    """Return two equal models that share `activation`."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 4))
    second = nn.Sequential(copy.deepcopy(first[0]), activation, copy.deepcopy(first[2]))
    return first, second


def alone(name: str) -> Tensor:
    """Return what a model with an activation of its own computes."""
    return hs.prepare(twins(Records())[0], policy=policy(name))(X)  # type: ignore[no-any-return]


@pytest.mark.parametrize("one", POLICIES)
@pytest.mark.parametrize("other", POLICIES)
def test_each_model_computes_as_if_the_activation_were_its_own(one: str, other: str) -> None:
    first, second = twins(Records())
    hs.prepare(first, policy=policy(one))
    hs.prepare(second, policy=policy(other))
    for _ in range(2):
        assert torch.equal(first(X), alone(one)) and torch.equal(second(X), alone(other))
    hs.unprepare(second)
    assert torch.equal(first(X), alone(one))
    assert torch.equal(second(X), alone("O0")) or other == "O3"  # which keeps no fp32 weights
    hs.unprepare(first)
    assert type(first[1]) is Records and (torch.equal(first(X), alone("O0")) or one == "O3")
    assert STATE.bound is None


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("activation", [nn.GELU(), nn.Softmax(-1), Records()])
def test_a_model_that_is_not_prepared_computes_as_before(name: str, activation: nn.Module) -> None:
    first, second = twins(activation)
    before = second(X)
    hs.prepare(first, policy=policy(name))
    assert torch.equal(second(X), before)
    with torch.autocast("cpu", torch.bfloat16):
        inside = second(X)
    hs.unprepare(first)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(second(X), inside)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_is_not_prepared_is_computed_again_as_before(reentrant: bool) -> None:
    first, second = twins(nn.Softmax(-1))
    hs.prepare(first, policy=policy("O1"))  # softmax in fp32, where torch.autocast on a CPU leaves it as it comes
    layer: nn.Linear = second[0]  # type: ignore[assignment]
    gradients = list[Tensor]()
    for checkpointed in (False, True):
        second.zero_grad()
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(second, x, use_reentrant=reentrant) if checkpointed else second(x)
            loss = (y * y[:, :1]).sum()
        loss.backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


def test_a_rule_holds_in_the_models_of_its_policy_only() -> None:
    activation = Records()
    first, second = twins(activation)
    before = second(X)
    hs.prepare(first, policy=policy("mixed").with_modules({"class:Records": "fp32"}))
    hs.prepare(second, policy=policy("mixed"))
    activation.seen.clear()
    first(X), second(X)
    assert activation.seen == [torch.float32, torch.bfloat16]
    hs.unprepare(second)
    activation.seen.clear()
    first(X)
    assert torch.equal(second(X), before) and activation.seen == [torch.float32, torch.float32]


def test_the_model_with_the_rule_may_come_second() -> None:
    activation = Records()
    first, second = twins(activation)
    hs.prepare(first, policy=policy("mixed"))
    hs.prepare(second, policy=policy("mixed").with_modules({"1": "fp32"}))
    activation.seen.clear()
    first(X), second(X)
    assert activation.seen == [torch.bfloat16, torch.float32]


def test_two_rules_for_one_activation_are_refused_in_words() -> None:
    first, second = twins(nn.GELU())
    hs.prepare(first, policy=policy("mixed").with_modules({"1": "fp32"}))
    for rule in ("low", "fp32"):
        other = policy("O1").with_modules({"1": rule})
        with pytest.raises(BindError, match=rf"module '1' serves another prepared model.*'fp32'.*'{rule}'.*deepcopy"):
            hs.prepare(second, policy=other)
    assert type(second[0]) is nn.Linear and hs.prepared_policy(second) is None
    hs.prepare(second, policy=policy("mixed").with_modules({"1": "fp32"}))
    hs.unprepare(first)
    hs.unprepare(second)
    hs.prepare(second, policy=policy("O1").with_modules({"1": "low"}))


def test_a_model_that_is_gone_binds_nothing() -> None:
    first, second = twins(nn.GELU())
    hs.prepare(first, policy=policy("mixed").with_modules({"1": "fp32"}))
    del first
    assert hs.prepare(second, policy=policy("O1").with_modules({"1": "low"})) is second


@pytest.mark.parametrize("name", ["torch", "mixed", "O1"])
def test_a_loss_of_the_model_keeps_its_rule_outside(name: str) -> None:
    model = nn.ModuleDict({"body": nn.Linear(8, 1), "loss": nn.MSELoss()})
    hs.prepare(model, policy=policy(name))
    low = torch.randn(4, 1).bfloat16()
    assert model["loss"](low, torch.zeros(4, 1)).dtype is torch.float32
    assert model["loss"](low, low * 0).dtype is torch.float32


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_activation_under_activation_checkpointing(name: str, reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self, activation: nn.Module, *, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.activation = nn.Linear(8, 8), activation
            self.checkpointed = checkpointed

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if self.checkpointed:
                return checkpoint(self.activation, h, use_reentrant=reentrant)  # type: ignore[no-any-return]
            return self.activation(h)  # type: ignore[no-any-return]

    def gradient(*, checkpointed: bool, shared: bool) -> Tensor:
        activation = nn.Softmax(-1)
        model = Net(activation, checkpointed=checkpointed)
        hs.prepare(model, policy=policy(name))
        if shared:
            hs.prepare(Net(activation, checkpointed=False), policy=policy("mixed").with_ops(fp32=["linear"]))
        x = X.clone().requires_grad_()
        model(x).float().square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = gradient(checkpointed=False, shared=False)
    assert torch.equal(gradient(checkpointed=True, shared=False), want)
    assert torch.equal(gradient(checkpointed=False, shared=True), want)


@pytest.mark.parametrize("name", ["torch", "mixed", "O2"])
def test_a_guest_with_a_rule_is_compiled_without_a_break(name: str) -> None:
    torch._dynamo.reset()
    first, second = twins(nn.GELU())
    hs.prepare(first, policy=policy(name).with_modules({"1": "fp32"}))
    hs.prepare(second, policy=policy("O1"))
    for model in (first, second):
        want = model(X)
        got = torch.compile(model, backend="eager", fullgraph=True)(X)
        assert got.dtype is want.dtype and torch.equal(got, want)


def test_a_copy_of_a_guest_is_a_guest() -> None:
    first, second = twins(Records())
    hs.prepare(first, policy=policy("mixed"))
    twin = copy.deepcopy(first)
    second[1] = twin[1]
    before = copy.deepcopy(second).requires_grad_(requires_grad=False)
    assert torch.equal(second(X), before(X)) and torch.equal(twin(X), first(X))
    hs.unprepare(twin)
    assert type(twin[1]) is Records


@pytest.mark.parametrize("released", [False, True])
def test_a_guest_that_is_prepared_by_itself_has_a_policy_of_its_own(released: bool) -> None:
    """Whether `hs.unprepare` of it came first or not: it is the module that the user names."""
    first, second = twins(Records())
    for model in (first, second):
        hs.prepare(model, policy=policy("O1"))
    guest = first[1]
    if released:
        hs.unprepare(guest)
    given: list[torch.dtype] = []
    guest.register_forward_hook(lambda module, args, output: given.append(output.dtype))
    first(X)
    hs.prepare(guest, policy=hs.Policy(dtype="bf16", table="none", ops=(("softmax", "low"),)))
    first(X)
    assert given == [torch.float32, torch.bfloat16]
