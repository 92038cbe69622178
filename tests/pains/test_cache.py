"""Low copies of weights and activations: never stale, never of the wrong format, never made twice."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.pains.eyes import Casts
from tests.pains.pain import pain

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def square() -> nn.Linear:
    return nn.Linear(8, 8, bias=False)


def weight_casts(casts: Casts) -> int:
    return casts.shapes.count((8, 8))


@pain(6, torch_fails_with=None)
def test_a_weight_used_without_gradients_first_still_gets_one(amp: Any) -> None:
    """Cured in torch by pytorch/pytorch PR 165068 (December 2025)."""
    for dtype in (torch.bfloat16, torch.float16):
        layer = square()
        with amp.autocast("cpu", dtype=dtype):
            with torch.no_grad():
                layer(X)
            out = layer(X)
        out.float().sum().backward()
        assert layer.weight.grad is not None


@pain(7, torch_fails_with=AssertionError, saying="stale")
def test_a_weight_changed_inside_a_region_is_seen(amp: Any) -> None:
    layer = square()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with amp.region("fp16"):
        before = layer(X)
        before.float().square().sum().backward()
        optimizer.step()
        assert not torch.equal(layer(X), before), "stale: the optimizer stepped and the output is the same"
        with torch.no_grad():
            layer.weight.copy_(torch.eye(8))  # an average, or a reference model's weights
        assert torch.equal(layer(X), X.half()), "stale: weights were copied and the output is not theirs"


@pain(7, torch_fails_with=AssertionError, saying="stale")
def test_a_weight_changed_inside_an_fp16_region_is_seen(amp: Any) -> None:
    layer = square()
    with amp.region("fp16"):
        before = layer(X)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(X), before * 2), "stale: the weight was doubled and the output is the same"


@pain(8, torch_fails_with=RuntimeError, saying="same dtype")
def test_regions_of_two_formats_nest(amp: Any) -> None:
    layer = square()
    with amp.autocast("cpu", dtype=torch.bfloat16):
        assert layer(X).dtype is torch.bfloat16
        with amp.autocast("cpu", dtype=torch.float16):
            assert layer(X).dtype is torch.float16
        assert layer(X).dtype is torch.bfloat16


@pain(
    9,
    torch_fails_with=AssertionError,
    saying="frozen weight was cast 3 times",
)
def test_a_frozen_weight_is_cast_once_a_region(amp: Any) -> None:
    layer = square().requires_grad_(False)
    with amp.region("fp16"), Casts() as casts:
        for _ in range(3):
            layer(X)
    assert weight_casts(casts) == 1, f"a frozen weight was cast {weight_casts(casts)} times for 3 calls"


@pain(9, torch_fails_with=AssertionError, saying="view of a weight was cast 3 times")
def test_a_view_of_a_weight_is_cast_once_a_region(amp: Any) -> None:
    both = nn.Parameter(torch.randn(16, 8))
    with amp.region("fp16"), Casts() as casts:
        for _ in range(3):
            nn.functional.linear(X, both[:8])
    assert weight_casts(casts) <= 1, f"a view of a weight was cast {weight_casts(casts)} times for 3 calls"


@pain(9, torch_fails_with=AssertionError, saying="a weight was cast 3 times")
def test_a_weight_is_cast_once_a_region_in_inference_mode(amp: Any) -> None:
    layer = square()
    with torch.inference_mode(), amp.region("fp16"), Casts() as casts:
        for _ in range(3):
            layer(X)
    assert weight_casts(casts) == 1, f"a weight was cast {weight_casts(casts)} times for 3 calls"


@pain(10, torch_fails_with=AssertionError, saying="2 low copies of weights are held")
def test_an_evaluation_leaves_no_low_copies_behind(amp: Any) -> None:
    held: list[int] = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad(), Casts() as casts:
            model(x)
            held.append(casts.held.count((8, 8)))
        loss: Tensor = model(x).float().sum()
        return loss

    model = nn.Sequential(square(), square())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.training(model, optimizer, loss_fn, dtype="bf16", weights="masters")(X)
    assert held == [0], f"{held[0]} low copies of weights are held in the region, beside the fp32 ones"


@pain(11, torch_fails_with=AssertionError, saying="cast 2 times because another thread")
def test_another_threads_region_does_not_empty_the_cache(amp: Any) -> None:
    layer = square()

    def elsewhere() -> None:
        with amp.autocast("cpu", enabled=False):
            pass

    with amp.region("fp16"), Casts() as casts:
        layer(X)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        layer(X)
    count = weight_casts(casts)
    assert count == 1, f"the weight was cast {count} times because another thread left a region"


@pain(13, torch_fails_with=AssertionError, saying="cast 3 times", pending="casts of activations are shared in bf16")
def test_one_activation_for_three_layers_is_cast_once(amp: Any) -> None:
    query, key, value = square(), square(), square()
    x = X * torch.ones((), requires_grad=True)
    with amp.region("bf16"), Casts() as casts:
        query(x), key(x), value(x)
    count = casts.shapes.count((4, 8))
    assert count == 1, f"one activation for three layers was cast {count} times"
