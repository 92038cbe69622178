"""Methods of a prepared model other than forward: see note [methods] of binding/bind.py."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import halfstep as hs
from halfstep.cast.state import STATE
from halfstep.errors import RegionError

POLICIES = ("torch", "mixed", "O2", "pure", "lean")
X, ACTION = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4


def policy(name: str) -> hs.Policy:
    return hs.Policy.of(name, dtype="bf16")


def marked(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Sampler:
    """A mixin that is no module."""

    def sample(self, count: int) -> Tensor:
        made: Tensor = self.actor(torch.linspace(-1, 1, 8).expand(count, 8))  # type: ignore[attr-defined]
        return made.sigmoid()


class Agent(Sampler, nn.Module):
    """Used by methods; it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic, self.low_rank = nn.Linear(8, 1), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def evaluate(self, x: Tensor, /, action: Tensor | None = None, *, twice: bool = False) -> dict[str, Tensor]:
        """What it gives."""
        chances = Categorical(logits=self.actor(x) * (2 if twice else 1))
        return {"chance": chances.log_prob(ACTION if action is None else action), "entropy": chances.entropy()}

    @marked
    def value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x @ self.critic.weight.T + self.critic.bias

    @torch.no_grad()
    def merge(self) -> None:
        self.actor.get_parameter("0.weight").add_(self.low_rank.weight @ self.low_rank.weight)

    def logit_scale(self) -> Tensor:
        return self.scale.exp()

    def weights(self, *, data: bool = False) -> list[Tensor]:
        return [p.data if data else p for p in self.parameters()]

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        yield self.critic(x)

    async def later(self, x: Tensor) -> Tensor:
        return next(self.parts(x))

    async def stream(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield self.critic(x)

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    @classmethod
    def made(cls, x: Tensor) -> Agent:
        return cls()

    @property
    def width(self) -> int:
        return 8


def agent(name: str | None = None, **changes: Any) -> Agent:
    torch.manual_seed(0)
    made = Agent()
    return made if name is None else hs.prepare(made, policy=policy(name).replace(**changes))


@pytest.mark.parametrize("name", POLICIES)
def test_outputs_are_what_the_policy_says(name: str) -> None:
    model, plain = agent(name), agent()
    found, want = model.evaluate(X, twice=True), plain.evaluate(X, twice=True)
    assert type(found) is dict and {value.dtype for value in found.values()} == {torch.float32}
    assert all(torch.allclose(found[key], want[key], atol=0.02) for key in want)
    given, value = model.value(x=X)
    assert given is X and value.dtype is torch.float32
    assert torch.allclose(value, plain.value(X)[1], atol=0.02)
    assert model.sample(3).dtype is torch.float32 and model.logit_scale().dtype is torch.float32
    assert not torch.equal(model.sample(3), model.sample(3).bfloat16().float())  # the sigmoid is not rounded
    assert agent(name, outputs="keep").sample(3).dtype is torch.bfloat16


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_computed_is_what_a_step_computes(name: str) -> None:
    """The ratio of old and new probabilities is exactly 1 before the first update."""
    model = agent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hs.TrainStep(model, optimizer, lambda m, x: m.evaluate(x)["chance"], policy=policy(name))
    with torch.no_grad():
        outside = model.evaluate(X)["chance"]
    assert torch.equal(step.evaluate(X).float(), outside)


@pytest.mark.parametrize("name", ["torch", "mixed", "O2", "pure"])
def test_a_method_without_tensors_changes_weights_as_without_a_policy(name: str) -> None:
    model, plain = agent(name), agent()
    if policy(name).params == "low":
        with hs.edit_weights(model):
            model.merge()
    else:
        model.merge()
    plain.merge()
    assert torch.equal(model.state_dict()["actor.0.weight"], plain.state_dict()["actor.0.weight"])
    assert all(map(lambda a, b: a is b, model.weights(), model.parameters()))
    for value, parameter in zip(model.weights(data=True), model.parameters(), strict=True):
        assert value.dtype is parameter.dtype and value.data_ptr() == parameter.data_ptr()


def test_what_is_read_of_a_method_is_the_users() -> None:
    model, plain = agent("O2"), agent()
    for name in ("evaluate", "value", "sample"):
        mine, theirs = getattr(model, name), getattr(plain, name)
        assert inspect.signature(mine) == inspect.signature(theirs) and mine.__doc__ == theirs.__doc__
        assert mine.__name__ == name and mine.__wrapped__ is getattr(Agent, name)
    for name in ("parts", "later", "stream", "twice", "made", "width", "parameters", "train"):
        assert inspect.getattr_static(type(model), name) is inspect.getattr_static(Agent, name)
    assert next(model.parts(X)).dtype is torch.bfloat16


def test_the_names_of_a_librarys_base_class_are_its_own() -> None:
    class Trainer(nn.Module):
        def validate(self, x: Tensor) -> Tensor:
            return x

    class Generation:
        def generate(self, x: Tensor) -> Tensor:
            return x

    Trainer.__module__, Generation.__module__ = "lightning.pytorch.core", "transformers.generation.utils"

    class Model(Generation, Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 2)

        def validate(self, x: Tensor) -> Any:
            return self.head(x)

        def encode(self, x: Tensor) -> Any:
            return self.head(x)

    model = hs.prepare(Model(), policy=policy("mixed"))
    assert model.encode(X).dtype is torch.float32 and model.validate(X).dtype is torch.bfloat16
    assert type(model).generate is Generation.generate


@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_copies_pickles_and_unprepared_models(name: str) -> None:
    model = agent(name)
    want = model.value(X)[1]
    for twin in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(twin.value(X)[1], want, atol=0.02) and twin.value(X)[1].dtype is torch.float32
    bound = pickle.loads(pickle.dumps(model.value))
    assert bound(X)[1].dtype is torch.float32
    assert type(hs.unprepare(model)) is Agent and torch.equal(model.value(X)[1], agent().value(X)[1])


def test_a_method_that_its_class_is_given_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = agent("mixed")
    monkeypatch.setattr(Agent, "value", lambda self, x: x + 1)
    assert torch.equal(model.value(X), X + 1)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.inner(x) + self.inner.bias
        return code

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.outer(self.encode(x))
        return made


@pytest.mark.parametrize(
    "name", [name if name in {"torch", "lean"} else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
def test_torch_compile_sees_methods(name: str) -> None:
    torch._dynamo.reset()
    model = hs.prepare(Coder(), policy=policy(name))
    for call in (model, model.encode):
        got = torch.compile(call, backend="eager", fullgraph=True)(X)
        assert got.dtype is torch.float32 and torch.equal(got, call(X))


def test_a_part_has_its_rule_and_its_own_format() -> None:
    low, wide = Coder(), Coder()
    model = hs.prepare(nn.Sequential(low, wide), policy=policy("O2").with_modules({"1": "fp32"}))
    assert low.encode(X).dtype is torch.bfloat16  # as its forward
    assert torch.equal(wide.encode(X.bfloat16()), Coder.encode(wide, X.bfloat16().float()))
    assert model(X).dtype is torch.float32


def test_the_statistics_of_a_model_used_by_a_method_are_those_of_good_steps() -> None:
    class Normed(Coder):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]

        def encode(self, x: Tensor) -> Tensor:
            code: Tensor = self.inner(x)
            return code

    model, other = Coder(), hs.prepare(Normed(), policy=policy("mixed"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hs.TrainStep(model, optimizer, lambda m, x: (m(x) - other.encode(x)).mean(), policy=policy("mixed"))
    before = {name: buffer.clone() for name, buffer in other.named_buffers()}
    assert step(X * torch.inf).host().skipped
    assert all(torch.equal(buffer, before[name]) for name, buffer in other.named_buffers())
    step(X)
    assert not torch.equal(other.get_buffer("inner.1.running_mean"), before["inner.1.running_mean"])


@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_an_exception_leaves_nothing_open(name: str) -> None:
    class Failing(Agent):
        def fail(self, *given: Any) -> None:
            raise KeyError(*given)

        def mixing(self) -> Tensor:
            return torch.ones(2, 8) @ self.critic.weight.T

    model = hs.prepare(Failing(), policy=policy(name))
    for given in ((), (X,)):
        with pytest.raises(KeyError):
            model.fail(*given)
        assert STATE.bound is None and not STATE.frames
    if name == "O2":
        with pytest.raises(RegionError, match="y.to\\(x.dtype\\)"):
            model.mixing()
