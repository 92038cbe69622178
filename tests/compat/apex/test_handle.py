"""init, its handles, rules for one's own functions, disable_casts, and the wrapper of the old API."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.compat.apex import amp
from halfstep.compat.apex.amp.handle import AmpHandle, NoOpHandle

FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
X = torch.rand(3, 3, generator=torch.Generator().manual_seed(0))


def dtype_of_a_product() -> torch.dtype:
    return (X @ X).dtype


def test_init_switches_casts_on_until_the_handle_is_deactivated() -> None:
    handle = amp.init()
    assert isinstance(handle, AmpHandle) and handle.is_active() and amp._amp_state.handle is handle
    assert dtype_of_a_product() is HALF and not handle.verbose and handle.has_cache and not handle.cache
    handle._clear_cache()
    handle.remove_cache(X)
    handle._deactivate()
    assert dtype_of_a_product() is FP32 and not handle.is_active()
    handle._deactivate()
    off = amp.init(enabled=False)
    assert isinstance(off, NoOpHandle) and not off.is_active() and not off.has_cache and not off.verbose
    assert dtype_of_a_product() is FP32
    with off.scale_loss(X, None) as loss:
        assert loss is X
    with off._disable_casts():
        off._clear_cache()


def test_init_prints_casts_if_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert amp.init(verbose=True, enable_caching=False).verbose
    _ = X.half().exp()
    assert capsys.readouterr().out == "Half->Float (exp)\n"


def test_disable_casts_is_off_inside_and_on_again_afterwards_whatever_happens() -> None:
    model = amp.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)
    handle = amp._amp_state.handle
    assert handle is not None
    with pytest.raises(ValueError, match="mine"), amp.disable_casts():
        assert dtype_of_a_product() is model(X).dtype is FP32 and not handle.is_active()
        with amp.disable_casts():
            assert model(X).dtype is FP32
        assert model(X).dtype is FP32
        raise ValueError("mine")
    assert dtype_of_a_product() is model(X).dtype is HALF and handle.is_active()


def test_casts_are_switched_off_in_the_thread_that_switched_them_on() -> None:
    handle, errors = amp.init(), []

    def work() -> None:
        try:
            handle._deactivate()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "belong to the thread" in errors[0] and dtype_of_a_product() is HALF


@amp.half_function
def halved(x: Tensor, *, others: Any = ()) -> tuple[Tensor, ...]:
    return (x, *others)


@amp.float_function
def widened(x: Tensor) -> torch.dtype:
    return x.dtype


@amp.promote_function
def promoted(x: Tensor, y: Tensor) -> tuple[torch.dtype, torch.dtype]:
    return x.dtype, y.dtype


def test_decorated_functions_follow_their_rule_only_while_casts_are_on() -> None:
    low = X.half()
    for active in (False, True, False):
        if active:
            handle = amp.init()
        halves = [x.dtype for x in halved(X, others=[X, low])]
        assert halves == ([HALF] * 3 if active else [FP32, FP32, HALF])
        assert widened(low) is (FP32 if active else HALF)
        assert promoted(X, low) == ((FP32, FP32) if active else (FP32, HALF))
        assert promoted(low, low) == (HALF, HALF)
        with amp.disable_casts():
            assert halved(X)[0] is X and widened(low) is HALF
        if active:
            handle._deactivate()


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("userlib")
    exec("def f(x): return x * 1\ndef g(x): return x.dtype\ndef h(x, y): return x.dtype", made.__dict__)
    yield made


def test_registered_functions_get_their_rule_from_the_next_start_on(module: Any) -> None:
    before = {name: getattr(module, name) for name in "fgh"}
    amp.register_half_function(module, "f")
    amp.register_float_function(module, "g")
    amp.register_promote_function(module, "h")
    assert module.f is before["f"]
    for _ in range(2):
        amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        registered = module.f is not before["f"]
        if registered:
            assert (module.f(X).dtype, module.g(X.half()), module.h(X.half(), X)) == (HALF, FP32, FP32)
        else:  # the registries were cleared by the first start
            break
    assert not registered
    with pytest.raises(ValueError, match="No function named missing in module"):
        amp.register_half_function(module, "missing")


def test_registered_functions_of_torch_change_their_rule_in_models_too() -> None:
    amp.register_float_function(torch, "mm")
    amp.register_half_function(F, "softmax")
    amp.register_half_function(torch, "sigmoid")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[torch.dtype, ...]:
            return torch.mm(x, x).dtype, F.softmax(x, -1).dtype, torch.sigmoid(x).dtype

    model = amp.initialize(Model(), opt_level="O1", verbosity=0)
    assert model(X) == (FP32, HALF, HALF)
    assert (torch.mm(X, X).dtype, F.softmax(X, -1).dtype, torch.sigmoid(X).dtype) == (FP32, HALF, HALF)
    amp.init()
    assert torch.mm(X, X).dtype is HALF and torch.sigmoid(X).dtype is FP32


# ---------------------------------------------------------------------- the old API


def test_the_old_wrapper_scales_each_loss_and_adds_gradients_up() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    handle = amp.init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    before = model.weight.detach().clone()
    for factor in (1e-3, 2e-3):
        with optimizer.scale_loss(model(X).float().sum() * factor) as scaled:
            scaled.backward()
    wanted = X.half().float().sum(0) * 3e-3
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad[0], wanted, rtol=1e-2, atol=1e-5)
    with pytest.raises(RuntimeError, match="num_loss=3"), optimizer.scale_loss(model(X).sum()):
        pass
    optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    with optimizer.scale_loss(model(X).float().sum()) as scaled:
        (scaled * float("inf")).backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert [s.loss_scale() for s in optimizer._loss_scaler] == [2.0**15, 2.0**16]


def test_the_old_wrapper_is_an_optimizer_in_everything_else() -> None:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = amp.init().wrap_optimizer(sgd)
    assert optimizer.param_groups is sgd.param_groups and repr(optimizer) == repr(sgd)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(ValueError), optimizer.scale_loss(model(X).float().sum()) as scaled:
        scaled.backward()
        raise ValueError
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight))
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        import pickle

        pickle.dumps(optimizer)
    with pytest.raises(RuntimeError, match="no longer supported"):
        amp.init().scale_loss(X, sgd)
    off = amp.init(enabled=False).wrap_optimizer(sgd)
    with off.scale_loss(X) as loss:
        assert loss is X
    off.step()


def test_every_thread_may_initialise_for_itself_also_after_another_one_has_ended() -> None:
    found: list[Any] = []

    def work() -> None:
        amp.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)
        found.append(dtype_of_a_product())
        amp.initialize(nn.Linear(3, 3), opt_level="O2", verbosity=0)
        found.append(dtype_of_a_product())
        amp.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [HALF, FP32] * 2 and dtype_of_a_product() is FP32
    amp.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)
    assert dtype_of_a_product() is HALF
    with amp.disable_casts():
        assert dtype_of_a_product() is FP32
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert dtype_of_a_product() is HALF
    amp.initialize(nn.Linear(3, 3), opt_level="O0", verbosity=0)
    assert dtype_of_a_product() is FP32


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize(
    "region",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: hs.autocast(policy="mixed"),
        amp.disable_casts,
    ],
    ids=["torch", "torch off", "halfstep", "disable_casts"],
)
def test_initialising_inside_a_region_is_refused_while_casts_are_on_and_changes_nothing(
    region: Any, level: str
) -> None:
    model = amp.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)
    handle = amp._amp_state.handle
    with region(), pytest.raises(RuntimeError, match=r"inside a region that was entered after them; call"):
        amp.initialize(nn.Linear(3, 3), opt_level=level, verbosity=0)
    assert amp._amp_state.handle is handle and dtype_of_a_product() is model(X).dtype is HALF
    amp.initialize(nn.Linear(3, 3), opt_level="O0", verbosity=0)
    assert dtype_of_a_product() is FP32
    with region(), pytest.raises(RuntimeError, match="switched on inside an autocast region"):
        amp.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)
    assert dtype_of_a_product() is FP32
