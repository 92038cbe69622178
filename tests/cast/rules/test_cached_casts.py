"""Cached casts: one for a weight and a region, one for an activation that several layers read, none of them stale."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.binding.bind import binding_of
from halfstep.cast import copies
from halfstep.cast.rules import dispatch
from halfstep.cast.rules.recipe import recipe_for

FP16, BF16 = torch.float16, torch.bfloat16
MIXED = hs.Policy.of("mixed", dtype="fp16", emulate="always")


class Casts(TorchDispatchMode):
    """Counts casts of tensors of one shape."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shape, self.dtype, self.count = shape, dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            func._schema.name in ("aten::_to_copy", "aten::to")
            and tuple(args[0].shape) == self.shape
            and out.dtype is self.dtype
        ):
            self.count += 1
        return out


def frozen_layer() -> nn.Linear:
    return nn.Linear(5, 7, bias=False).requires_grad_(False)


def test_a_frozen_weight_is_cast_once_in_a_region() -> None:
    layer = frozen_layer()
    with Casts((7, 5)) as seen:
        for _ in range(2):
            with hs.autocast(policy=MIXED):
                _ = layer(torch.randn(4, 5)), layer(torch.randn(4, 5))
    assert seen.count == 2


def test_torch_casts_it_at_every_use() -> None:
    layer = frozen_layer()
    with Casts((7, 5)) as seen, torch.autocast("cpu", dtype=FP16):
        _ = layer(torch.randn(4, 5)), layer(torch.randn(4, 5))
    assert seen.count == 2


def test_a_changed_frozen_weight_is_cast_again() -> None:
    model = hs.prepare(nn.Sequential(frozen_layer()), policy=MIXED)
    x = torch.randn(4, 5)
    before = model(x)
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[operator]  # a child is Tensor or Module to mypy
    assert torch.equal(model(x), before * 2)


def test_inference_mode_leaves_nothing_to_training() -> None:
    layer = nn.Linear(5, 7, bias=False)
    x = torch.randn(4, 5)
    with hs.autocast(policy=MIXED):
        with torch.inference_mode():
            found = layer(x).clone()
        out = layer(x)
    out.sum().backward()
    assert layer.weight.grad is not None and torch.equal(found, out)


@pytest.mark.parametrize("write", [lambda w: w.data.mul_(0.0), lambda w: setattr(w, "data", torch.zeros(7, 5))])
def test_a_write_through_data_is_seen_in_the_next_region(write: Callable[[Tensor], None]) -> None:
    layer = frozen_layer()
    model = hs.prepare(nn.Sequential(layer), policy=MIXED)
    model(torch.randn(4, 5))
    write(layer.weight)
    assert not model(torch.randn(4, 5)).any()


def test_memory_shared_with_numpy_is_read_again() -> None:
    array = np.ones((2, 5), dtype=np.float32)
    layer, x = nn.Linear(5, 7, bias=False), torch.from_numpy(array)
    with hs.autocast(policy=MIXED):
        layer(x)
        array[:] = 0
        assert not layer(x).any()


def test_a_copy_that_was_written_into_is_not_used_again() -> None:
    weight, x = nn.Parameter(torch.randn(5, 5)), torch.randn(2, 5)
    with hs.autocast(policy=MIXED.with_ops(low=["dropout"])):
        before = nn.functional.linear(x, weight)
        nn.functional.dropout(weight, 0.5, training=False).detach().zero_()
        assert torch.equal(nn.functional.linear(x, weight), before)


def test_a_weight_that_thaws_gets_its_gradient() -> None:
    model = hs.prepare(nn.Sequential(frozen_layer()), policy=MIXED)
    model(torch.randn(4, 5))
    model[0].weight.requires_grad = True
    model(torch.randn(4, 5)).sum().backward()
    assert model[0].weight.grad is not None


def test_copies_and_pickles_work_and_hold_no_casts() -> None:
    model = hs.prepare(nn.Sequential(frozen_layer()), policy=MIXED)
    x = torch.randn(4, 5)
    out = model(x)
    assert torch.equal(copy.deepcopy(model)(x), out)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), out)
    assert list(model.state_dict()) == ["0.weight"]


def test_an_update_in_the_middle_of_a_region_is_seen() -> None:
    layer, x = nn.Linear(5, 7, bias=False), torch.randn(4, 5)
    with hs.autocast(policy=MIXED):
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        after: Tensor = layer(x)
    assert torch.equal(after, before * 2)


def test_a_weight_used_many_times_is_cast_once() -> None:
    layer = nn.Linear(5, 5, bias=False)
    x = torch.randn(4, 5)
    with Casts((5, 5)) as seen, hs.autocast(policy=MIXED):
        for _ in range(3):
            x = layer(x)
    assert seen.count == 1


# ------------------------------------------------------------------ shared activations


class Heads(nn.Module):
    """An fp32 activation that three layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x).float().sin()
        a, b, c = (head(hidden) for head in self.heads)
        out: Tensor = a * b + c
        return out.float().square().mean()


@pytest.mark.parametrize("policy", ["torch", "mixed"])
def test_an_activation_that_three_layers_read_is_cast_once_with_the_gradients_of_torch_amp(policy: str) -> None:
    net, x = Heads(), torch.randn(1024, 64)
    twin = copy.deepcopy(net)
    hs.prepare(net, policy=hs.Policy.of(policy, dtype="bf16"))
    with Casts((1024, 64), BF16) as ours:
        loss = net(x)
    loss.backward()
    with Casts((1024, 64), BF16) as theirs, torch.autocast("cpu", dtype=BF16):
        expected = twin(x)
    expected.backward()
    assert (ours.count, theirs.count) == (2, 4)
    assert torch.equal(loss, expected)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_changed_activation_is_cast_again() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.sin() * 1.0
            before = self.linear(hidden)
            hidden.mul_(2)
            return self.linear(hidden) - 2 * before  # type: ignore[no-any-return]

    net = hs.prepare(Net(), policy=hs.Policy.of("mixed", dtype="bf16"))
    assert not net(torch.randn(1024, 64, requires_grad=True)).any()


def test_a_reader_on_another_stream_gets_a_copy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden = nn.Linear(64, 32, bias=False), torch.randn(1024, 64, requires_grad=True).sin()
    with Casts((1024, 64)) as activations, Casts((32, 64)) as weights, hs.autocast(policy=MIXED):
        for stream in (1, 1, 2, 2):
            monkeypatch.setattr(dispatch, "stream_of", lambda tensor, stream=stream: stream)
            layer(hidden)
    assert (activations.count, weights.count) == (2, 2)


def test_a_step_s_copy_that_another_stream_filled_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = 1
    monkeypatch.setattr(copies, "stream_of", lambda tensor: stream)
    recipe = recipe_for(hs.Policy.of("torch", dtype="bf16"), ("cpu",))
    layer = nn.Linear(1024, 1024, bias=False)
    kept = copies.Copies(layer, layer.parameters(), recipe)
    low = kept.of(layer.weight)
    assert low is not None and kept.of(layer.weight) is low
    stream = 2
    assert kept.of(layer.weight) is None
    stream = 1
    assert kept.of(layer.weight) is low


def test_an_activation_is_not_held_for_the_next_layer() -> None:
    gone: list[bool] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.sin()
            out = self.linear(hidden)
            seen = weakref.ref(hidden)
            del hidden
            gone.append(seen() is None)
            return out  # type: ignore[no-any-return]

    hs.prepare(Net(), policy=hs.Policy.of("mixed", dtype="bf16"))(torch.randn(1024, 64, requires_grad=True))
    assert gone == [True]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_weight_that_is_frozen_for_a_while_gets_its_gradient(dtype: str) -> None:
    """As a GAN's loop freezes each network for the other's turn."""
    layer = frozen_layer()
    with hs.autocast(policy=hs.Policy.of("mixed", dtype=dtype)):
        assert not layer(torch.randn(4, 5)).requires_grad
        layer.requires_grad_(True)
        layer(torch.randn(4, 5)).sum().backward()
    assert layer.weight.grad is not None


# ------------------------------------------------------------------ a model that is called without gradients


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that serves keeps copies of the small matrices of these tests."""
    monkeypatch.setattr(copies, "LARGE", copies.SMALL)


def serving(policy: str = "mixed") -> nn.Module:
    """A prepared model with a weight of 100 x 100, large enough for a copy."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 100), nn.GELU(), nn.LayerNorm(100), nn.Linear(100, 100))
    return hs.prepare(net, policy=hs.Policy.of(policy, dtype="bf16")).eval()


def lows(model: nn.Module) -> list[int]:
    """The addresses of the low weights that `model` keeps."""
    kept = binding_of(model).kept  # type: ignore[union-attr]
    return [] if kept is None else [copy.low.data_ptr() for copy in kept._copies.values()]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_cast_once_for_all_calls_without_gradients(without: Any, frozen: bool) -> None:
    model, x = serving().requires_grad_(not frozen), torch.randn(4, 100)
    expected = model(x).detach()
    for _ in range(3):
        with without():
            assert torch.equal(model(x), expected)
    first = lows(model)
    with without():
        model(x)
    assert lows(model) == first and len(first) == 2


def test_a_copy_of_a_matrix_is_kept_where_it_costs_less_than_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    net = nn.Sequential(nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1000, bias=False))
    net.append(nn.Linear(1000, copies.LARGE // 1000 + 1, bias=False))
    model = hs.prepare(net, policy=hs.Policy.of("mixed", dtype="bf16"))
    with torch.no_grad():
        model(torch.randn(1, 32, 4, 4))
    kept = binding_of(model).kept  # type: ignore[union-attr]
    assert kept is not None
    first, *_, last = (p.numel() for p in net.parameters() if p.dim() > 1)
    assert sorted(copy.low.numel() for copy in kept._copies.values()) == [first, last]


def test_a_call_with_gradients_drops_them_and_gives_the_gradients_of_one_without_copies() -> None:
    model, other, x = serving(), serving(), torch.randn(4, 100)
    with torch.no_grad():
        model(x)
    for net in (model, other):
        net(x).square().mean().backward()
    assert not lows(model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)


def test_gradients_switched_on_inside_a_call_reach_the_weights() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(100, 100)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                self.lin(x).float().sum().backward()
            return x

    model = hs.prepare(Inner(), policy=hs.Policy.of("mixed", dtype="bf16"))
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, 100))
    assert torch.equal(model.lin.weight.grad, torch.full((100, 100), 4.0))  # type: ignore[arg-type]


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda m: [p.mul_(2) for p in m.parameters()],
    "one element by .data": lambda m: [p.data.view(-1)[3].add_(1) for p in m.parameters()],
    "rows by .data": lambda m: [p.data.copy_(p.roll(1, 0)) for p in m.parameters()],
    "by .data": lambda m: [p.data.mul_(2) for p in m.parameters()],
    "by numpy": lambda m: [np.multiply(p.detach().numpy(), 2, out=p.detach().numpy()) for p in m.parameters()],
    "data set": lambda m: [p.set_(p.data * 2) for p in m.parameters()],  # type: ignore[call-overload]
    "parameters set": lambda m: [
        part._parameters.update({name: nn.Parameter(p * 2) for name, p in part.named_parameters(recurse=False)})
        for part in m.modules()
    ],
    "state_dict": lambda m: m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_changed_weight_is_cast_again(write: Callable[[nn.Module], object]) -> None:
    model, other, x = serving(), serving(), torch.randn(4, 100)
    with torch.no_grad():
        before = model(x)
        for net in (model, other):
            write(net)
        assert torch.equal(model(x), other(x)) and not torch.equal(model(x), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_copies_are_not_read_where_operators_are_recorded() -> None:
    model, x = serving(), torch.randn(4, 100)
    with torch.no_grad(), Casts((100, 100), BF16) as seen:
        model(x), model(x)
    assert seen.count == 4 and not lows(model)
    with torch.no_grad():
        traced: Any = torch.jit.trace(model, (x,), check_trace=False)
        model(x)
        for parameter in model.parameters():
            parameter.mul_(2)
        assert torch.equal(traced(x), model(x))


def test_copies_belong_to_one_model_and_go_with_it() -> None:
    model = serving()
    with torch.no_grad():
        model(torch.randn(4, 100))
    assert lows(model) and not lows(copy.deepcopy(model)) and not lows(pickle.loads(pickle.dumps(model)))
    kept = weakref.ref(binding_of(model).kept)  # type: ignore[union-attr]
    del model
    assert kept() is None
