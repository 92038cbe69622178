"""compat.torch_amp has torch's names and signatures, without its deprecation warnings, and means the same."""

from __future__ import annotations

import collections
import copy
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.cpu.amp
import torch.cuda.amp
from torch import Tensor, nn
from torch.autograd import Function

import halfstep as hs
from halfstep.compat import torch_amp
from halfstep.errors import PolicyError, RegionError, ScaleError

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

MODULES = {
    "": torch.amp,
    ".autocast_mode": torch.amp.autocast_mode,
    ".grad_scaler": torch.amp.grad_scaler,
    ".cuda": torch.cuda.amp,
    ".cuda.autocast_mode": torch.cuda.amp.autocast_mode,
    ".cuda.grad_scaler": torch.cuda.amp.grad_scaler,
    ".cuda.common": torch.cuda.amp.common,
    ".cpu": torch.cpu.amp,
    ".cpu.autocast_mode": torch.cpu.amp.autocast_mode,
    ".cpu.grad_scaler": torch.cpu.amp.grad_scaler,
}
"""Ours -> torch's."""

NAMES = {
    "": ["autocast", "custom_bwd", "custom_fwd", "is_autocast_available", "GradScaler"],  # no __all__ before torch 2.12
    ".cpu": ["autocast", "GradScaler"],  # no __all__
    ".cuda.common": ["amp_definitely_not_available"],
}


def public(path: str) -> list[str]:
    return list(NAMES.get(path) or MODULES[path].__all__)


def ours(path: str) -> Any:
    return importlib.import_module(f"halfstep.compat.torch_amp{path}")


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    if isinstance(function, type):  # Python 3.13 shows (*args, **kwargs) for a class that torch has deprecated
        return parameters(inspect.getattr_static(function, "__init__"))[1:]
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


CALLABLES = [(path, name) for path in MODULES for name in public(path) if name != "OptState"]


@pytest.mark.parametrize("path", MODULES)
def test_the_names_are_torchs(path: str) -> None:
    assert set(public(path)) <= set(ours(path).__all__)
    assert set(ours(path).__all__) - set(public(path)) <= {"cpu", "cuda"}


@pytest.mark.parametrize(("path", "name"), CALLABLES)
def test_signatures_are_equal(path: str, name: str) -> None:
    assert parameters(getattr(ours(path), name)) == parameters(getattr(MODULES[path], name))


METHODS = [name for name, value in vars(torch.amp.GradScaler).items() if callable(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_signatures_of_the_scalers_methods_are_equal(name: str) -> None:
    for path in ("", ".cuda", ".cpu"):
        assert parameters(getattr(ours(path).GradScaler, name)) == parameters(getattr(torch.amp.GradScaler, name))


def test_a_wrong_signature_would_be_seen() -> None:
    assert parameters(hs.autocast) != parameters(torch.amp.autocast)
    assert parameters(hs.GradScaler) != parameters(torch.amp.GradScaler)


def test_old_names_work_without_warnings() -> None:  # warnings are errors in tests; torch's own warn
    with pytest.warns(FutureWarning):
        MODULES[".cpu"].autocast()
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    with torch_amp.cpu.autocast():
        assert layer(x).dtype is BF16
    with torch_amp.cpu.autocast(True, HALF, False):
        assert layer(x).dtype is HALF
    with torch_amp.cpu.autocast(enabled=False):
        assert layer(x).dtype is FP32
    assert torch_amp.cpu.GradScaler(2.0).get_scale() == torch_amp.cuda.GradScaler(2.0).get_scale() == 2.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without CUDA")
def test_a_program_for_cuda_runs_in_emulated_fp16_where_there_is_none() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    with torch_amp.cuda.autocast() as region:
        assert layer(x).dtype is HALF
    assert region.recipe.policy.dtype == "fp16"
    assert not torch_amp.cuda.amp_definitely_not_available()
    with pytest.warns(UserWarning, match="without CUDA does nothing"), torch_amp.autocast("cuda", enabled=True):
        assert layer(x).dtype is FP32  # a device that is named is taken at its word, as by torch


def test_a_region_means_what_torchs_does() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    with torch_amp.autocast("cpu"), torch.autocast("cpu", dtype=BF16):
        assert layer(x).dtype is BF16

    @torch_amp.autocast(device_type="cpu", dtype=HALF)
    def decorated() -> Tensor:
        with torch_amp.autocast("cpu", enabled=False):
            assert layer(x).dtype is FP32
        return layer(x)  # type: ignore[no-any-return]

    assert decorated().dtype is HALF
    assert torch_amp.autocast_mode.autocast_decorator(torch_amp.autocast("cpu"), lambda: layer(x))().dtype is BF16
    assert isinstance(torch_amp.autocast("cpu"), hs.autocast)


def test_what_torch_refuses_is_refused_with_the_remedy() -> None:
    calls: list[Callable[[Any], Any]] = [torch_amp.autocast, lambda d: torch_amp.custom_fwd(device_type=d)]
    for call in calls:
        with pytest.raises(ValueError, match=r"expected a string.*torch_amp.cuda.autocast\(\)"):
            call(True)
    with pytest.raises(PolicyError, match="expected a string"):
        torch_amp.custom_bwd(device_type=3)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="'nothing' is no device"):
        torch_amp.autocast("nothing")
    with pytest.raises(TypeError, match="device_type"):
        torch_amp.autocast()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="decorates functions"):
        torch_amp.autocast("cpu")(3)  # type: ignore[arg-type]
    with pytest.raises(RegionError, match="suspended by yield"):
        torch_amp.autocast("cpu")(lambda: (yield))
    with pytest.raises(ScaleError, match="growth_factor"):
        torch_amp.GradScaler("cpu", growth_factor=0.5)


def test_a_scaler_survives_copying_and_pickling_and_shares_torchs_checkpoints() -> None:
    scaler = torch_amp.GradScaler("cpu", init_scale=2.0**7)
    for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(copied) is torch_amp.GradScaler and copied.get_scale() == 2.0**7
    torchs = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.load_state_dict(torchs.state_dict())
    assert scaler.get_scale() == 8.0
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.get_scale() == 8.0


# ---------------------------------------------------------------------- custom_fwd, custom_bwd


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def product(module: Any, **options: Any) -> type[Function]:
    """Return a matrix product as an autograd.Function, decorated with the names of `module`."""

    class Product(Function):
        @staticmethod
        @module.custom_fwd(device_type="cpu", **options)
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @module.custom_bwd(device_type="cpu")
        def backward(ctx: Any, *grads: Tensor) -> Any:
            a, b = ctx.saved_tensors
            return grads[0] @ b.mT, a.mT @ grads[0]

    return Product


@pytest.mark.parametrize("options", [{}, {"cast_inputs": FP32}, {"cast_inputs": BF16}])
@pytest.mark.parametrize("inside", [True, False])
def test_a_function_of_ones_own_computes_what_it_does_under_torch(options: dict[str, Any], inside: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    results = []
    for module, region in ((torch.amp, torch.autocast), (torch_amp, torch_amp.autocast)):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        with region("cpu", dtype=BF16, enabled=inside):
            out: Tensor = product(module, **options).apply(x, y)
        out.float().square().sum().backward()
        results.append((out, x.grad, y.grad))
    for theirs, mine in zip(*results, strict=True):
        assert theirs is not None and mine is not None
        assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)


def test_backward_is_emulated_where_forward_was() -> None:
    a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    b = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with torch_amp.autocast("cpu", dtype=HALF):
        out: Tensor = product(torch_amp).apply(a, b)
    out.backward(torch.ones_like(out))
    want = (torch.ones(64, 64) @ b.half().float().mT).half().float()  # one rounding, of the fp32 result
    assert out.dtype is HALF and a.grad is not None and torch.equal(a.grad, want)


def test_inputs_are_cast_in_every_container_and_containers_keep_their_type() -> None:
    seen: list[Any] = []

    @torch_amp.custom_fwd(device_type="cpu", cast_inputs=BF16)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs, torch.is_autocast_enabled("cpu")))

    class Context:
        pass

    x = torch.ones(2)
    arguments = (
        Pair(x, x.double()),
        collections.OrderedDict(a=[x, "text", 3]),
        (torch.ones(1, dtype=torch.int32), None),
    )
    forward(Context(), *arguments, key={"k": x})
    with torch_amp.autocast("cpu", dtype=HALF):
        forward(Context(), *arguments, key={"k": x})
    outside, ((pair, ordered, plain), kwargs, enabled) = seen
    assert outside[0][0] is arguments[0] or outside[0][0].left is x
    assert type(pair) is Pair and pair.left.dtype is BF16 and pair.right.dtype is torch.float64
    assert (
        type(ordered) is collections.OrderedDict and ordered["a"][0].dtype is BF16 and ordered["a"][1:] == ["text", 3]
    )
    assert plain[0].dtype is torch.int32 and plain[1] is None
    assert kwargs["key"]["k"].dtype is BF16 and not enabled


def test_backward_without_a_decorated_forward_is_explained() -> None:
    @torch_amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any) -> None: ...

    with pytest.raises(PolicyError, match=r"put @custom_fwd\(device_type='cpu'\) on forward"):
        backward(object())


def test_the_decorators_of_cuda_take_no_device() -> None:
    class Double(Function):
        @staticmethod
        @torch_amp.cuda.custom_fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch_amp.cuda.custom_bwd
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0] * 2

    x = torch.ones(2, requires_grad=True)
    with torch_amp.cuda.autocast():
        out: Tensor = Double.apply(x)  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    assert callable(torch_amp.cuda.custom_fwd(cast_inputs=FP32))


def test_availability_is_torchs_answer() -> None:
    assert torch_amp.is_autocast_available("cpu") and not torch_amp.is_autocast_available("meta")


@pytest.mark.parametrize("device", ["not a real device", "", "meta", 3, None])
def test_an_invalid_device_raises_what_torch_raises(device: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        torch.autocast(device)
    with pytest.raises(torchs.type):
        torch_amp.autocast(device)


def test_a_cached_copy_lives_as_long_as_torchs_where_caches_are_off_between() -> None:
    def gradient(region: Any) -> Tensor:
        torch.manual_seed(0)
        weight, h = torch.randn(64, 64, requires_grad=True), torch.randn(8, 64)
        with region("cpu", dtype=torch.bfloat16):
            with region("cpu", dtype=torch.bfloat16, cache_enabled=False):
                h = nn.functional.linear(h, weight)
                with region("cpu", dtype=torch.bfloat16, cache_enabled=True):
                    h = nn.functional.linear(nn.functional.linear(h, weight), weight)
                h = nn.functional.linear(h, weight)
            h = nn.functional.linear(h, weight)
        return torch.autograd.grad(h.float().square().sum(), weight)[0]

    assert torch.equal(gradient(torch_amp.autocast), gradient(torch.autocast))
