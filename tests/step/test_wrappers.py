"""Wrappers around models and optimizers, by classes with the names and the structure of the libraries' own."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import halfstep as hs
from halfstep.binding.wrappers import unwrap, unwrap_optimizer
from halfstep.errors import BindError, WeightsError
from halfstep.weights.states import LowStates

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def policy(name: str) -> hs.Policy:
    return hs.Policy.of(name, dtype="bf16")


class AcceleratedOptimizer(Optimizer):
    """accelerate's: an Optimizer whose __init__ is not called."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


class _FabricOptimizer:
    """Fabric's: it takes the optimizer's class as a second base, so that isinstance holds."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Any = None) -> None:
        self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class LightningOptimizer(_FabricOptimizer):
    pass


class _FabricModule(nn.Module):
    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = forward_module, original

    def forward(self, *args: Any) -> Any:
        return self._forward_module(*args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)


OPTIMIZERS = [AcceleratedOptimizer, _FabricOptimizer, LightningOptimizer]


@pytest.mark.parametrize("name", ["mixed", "O2", "pure"])
@pytest.mark.parametrize("wrap", OPTIMIZERS)
def test_a_wrapped_optimizer_steps_fp32_weights(wrap: Any, name: str) -> None:
    model = nn.Linear(4, 4)
    inner = SGD(model.parameters(), lr=1e-4)
    wrapped = wrap(inner)
    found, optimizer, _ = hs.prepare(model, wrapped, policy=policy(name))
    assert found is model and optimizer is wrapped and unwrap_optimizer(wrapped) is inner
    before = model.state_dict()["weight"].clone()
    model(X).float().sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    optimizer.step()
    after = model.state_dict()["weight"]
    assert after.dtype is torch.float32
    assert torch.equal(after, before - 1e-4 * gradient.float()) or name == "pure"
    assert not torch.equal(after, before)


@pytest.mark.parametrize("wrap", OPTIMIZERS)
def test_a_training_step_takes_the_optimizer_out_of_its_wrapper(wrap: Any) -> None:
    model = nn.Linear(4, 4)
    inner = SGD(model.parameters(), lr=0.1)
    step = hs.TrainStep(model, wrap(inner), lambda m, x: m(x).float().mean(), policy=policy("O2"))
    assert step.optimizer is inner and step(X).host().updated


def test_wrappers_around_wrappers() -> None:
    inner = SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    assert unwrap_optimizer(AcceleratedOptimizer(_FabricOptimizer(inner))) is inner  # type: ignore[arg-type]


def test_a_wrapper_that_is_not_known_is_refused_in_words() -> None:
    class Lookahead(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner

        @property
        def param_groups(self) -> Any:  # type: ignore[override]
            return self.inner.param_groups

    model = nn.Linear(4, 4)
    with pytest.raises(BindError, match="Lookahead has no _optimizer_step_pre_hooks.*before it is wrapped"):
        hs.prepare(model, Lookahead(SGD(model.parameters(), 0.1)), policy=policy("O2"))
    assert type(model) is nn.Linear and model.weight.dtype is torch.float32


@pytest.mark.parametrize("name", ["O0", "mixed", "O2", "lean"])
@pytest.mark.parametrize("made", range(8))
def test_an_optimizer_that_torch_has_made_in_part_is_refused_in_words(name: str, made: int) -> None:
    """It has `made` of the hook dictionaries that torch makes; all of them, but no defaults; all, but a plain dict."""

    class Partial(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
            for hook, kept in [(key, value) for key, value in vars(inner).items() if key.endswith("_hooks")][:made]:
                setattr(self, hook, dict(kept) if made == 7 else kept)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    model = nn.Linear(4, 4)
    optimizer = Partial(SGD(model.parameters(), 0.1))
    for call in (
        lambda: hs.prepare(model, optimizer, policy=policy(name)),
        lambda: hs.TrainStep(model, optimizer, lambda m, x: m(x).mean(), policy=policy(name)),
    ):
        with pytest.raises(BindError, match="Partial has no .* before it is wrapped.* call super"):
            call()
        assert type(model) is nn.Linear and model.weight.dtype is torch.float32
    with pytest.raises(WeightsError, match="Partial has no .* give hs.prepare the optimizer inside it"):
        LowStates(optimizer)


@pytest.mark.parametrize("name", ["mixed", "O2", "pure"])
def test_fabrics_module_is_returned_and_what_is_in_it_is_prepared(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    wrapped = _FabricModule(model, model)
    assert hs.prepare(wrapped, policy=policy(name)) is wrapped and unwrap(wrapped) is model
    assert hs.prepared_policy(model) == policy(name)
    assert torch.equal(wrapped(X), model(X))
    assert model[0].weight.dtype is (torch.float32 if name == "mixed" else torch.bfloat16)
    hs.unprepare(wrapped)
    assert type(model) is nn.Sequential


def test_a_wrapper_with_hooks_inside_fabrics_is_refused_for_low_parameters() -> None:
    model = nn.Linear(4, 4)
    wrapped = _FabricModule(nn.DataParallel(model), model)
    with pytest.raises(BindError, match=r"hs\.prepare.* first, then wrap"):
        hs.prepare(wrapped, policy=policy("O2"))
    assert hs.prepare(wrapped, policy=policy("mixed")) is wrapped and hs.prepared_policy(model) is not None


# ------------------------------------------------------------------ what no policy can be bound to


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_modules_compiled_by_torch_jit_are_refused_in_words(name: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted, self.plain = torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(self.scripted(x))  # type: ignore[no-any-return]

    for model in (torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Linear(4, 4), X), Half()):
        with pytest.raises(BindError, match=r"module '(<root>|scripted)' is a .*torch Module that it was made from"):
            hs.prepare(model, policy=policy(name))
        assert not any("_halfstep" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("kind", ["FullyShardedDataParallel", "DeepSpeedEngine"])
def test_models_that_a_library_shards_or_runs_are_refused_in_words(kind: str) -> None:
    model = nn.Sequential(type(kind, (nn.Linear,), {})(4, 4))
    with pytest.raises(BindError, match="module '0' is (already )?(sharded|run) by"):
        hs.prepare(model, policy=policy("mixed"))


@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_a_forward_of_an_instance_is_refused_where_it_hides_a_region(name: str) -> None:
    def own(self: nn.Linear, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)

    model = nn.Linear(4, 4)
    model.forward = types.MethodType(own, model)  # type: ignore[method-assign]
    with pytest.raises(BindError, match=r"the model has a forward of its own.*del model\.forward"):
        hs.prepare(model, policy=policy(name))
    whole = nn.Sequential(model, nn.Linear(4, 4))
    with pytest.raises(BindError, match="module '0' has a forward of its own"):
        hs.prepare(whole, policy=policy(name).with_modules({"0": "fp32"}))
    hs.prepare(whole, policy=policy(name))
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    whole(X)
    assert seen == [torch.bfloat16]  # the model's region is open already


def test_a_forward_that_is_replaced_after_prepare_may_call_the_bound_one() -> None:
    model = hs.prepare(nn.Linear(4, 4), policy=policy("torch").replace(outputs="keep"))
    bound = model.forward
    model.forward = lambda x: 2 * bound(x)  # type: ignore[method-assign, assignment]
    assert model(X).dtype is torch.bfloat16
    hs.prepare(model, policy=policy("torch").replace(outputs="keep"))
