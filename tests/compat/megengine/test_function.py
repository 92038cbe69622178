"""megengine.autodiff.Function: the user's backward pass is the derivative, with several inputs and outputs, nested."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import halfstep.compat.megengine as mge
import halfstep.compat.megengine.functional as F
from halfstep.compat.megengine import amp
from halfstep.compat.megengine.autodiff import Function, GradManager


def grad(tensor: Tensor) -> float | None:
    return None if tensor.grad is None else tensor.grad.item()


class Several(Function):
    """Two outputs of two inputs, with a derivative that is not theirs."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        self.a, self.b = a, b
        return a * b, a + b

    def backward(self, first: Tensor | None, second: Tensor | None) -> Any:
        assert first is not None
        return 2 * first * self.b, None if second is None else second * 5


class Sigmoid(Function):
    """A function that keeps its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.y = 1 / (1 + F.exp(-x))
        return self.y

    def backward(self, dy: Tensor | None) -> Any:
        return None if dy is None else dy * self.y * (1 - self.y)


class Product(Function):
    """A matrix product, whose backward pass mixes formats without casts."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        self.x, self.w = x, w
        return F.matmul(x, w)

    def backward(self, dy: Tensor | None) -> Any:
        assert dy is not None
        return F.matmul(dy, self.w.T), F.matmul(self.x.T, dy)


def test_several_inputs_and_outputs() -> None:
    a, b = mge.Parameter([3.0]), mge.Parameter([4.0])
    gm = GradManager().attach([a, b])
    with gm:
        product, total = Several()(a, b)
        gm.backward(product + total)
    assert (product.item(), total.item()) == (12.0, 7.0) and (grad(a), grad(b)) == (8.0, 5.0)
    a.grad = b.grad = None
    with gm:
        gm.backward(Several()(a, b)[0])  # the loss does not depend on the other output
    assert (grad(a), grad(b)) == (8.0, None)


def test_higher_derivatives_go_through_what_forward_kept() -> None:
    x = mge.tensor([0.25, 1.0])
    outer, inner = GradManager().attach(x), GradManager().attach(x)
    with outer:
        with inner:
            inner.backward(Sigmoid()(x))
        first: Any = x.grad
        x.grad = None
        outer.backward(first)
    s = torch.sigmoid(x.detach())
    torch.testing.assert_close(first.detach(), s * (1 - s))
    second: Any = x.grad
    torch.testing.assert_close(second, s * (1 - s) * (1 - 2 * s))


@pytest.mark.parametrize("inside", [True, False])
def test_backward_runs_in_the_region_of_forward(inside: bool) -> None:
    torch.manual_seed(0)
    x, w = mge.Parameter(torch.randn(3, 4)), mge.Parameter(torch.randn(4, 2))
    gm, scaler = GradManager().attach([x, w]), amp.GradScaler()
    with gm:
        with amp.autocast():
            y = Product()(x, w)
            loss = F.nn.square_loss(y, F.zeros((3, 2)))
            if inside:
                scaler.backward(gm, loss)
        if not inside:
            scaler.backward(gm, loss)
    assert y.dtype is torch.float16 and w.grad is not None and w.grad.dtype is torch.float32
    exact = torch.autograd.grad((x @ w).square().mean(), w)[0]
    torch.testing.assert_close(w.grad, exact, rtol=1e-2, atol=1e-3)


def test_an_instance_can_be_copied_and_is_freed_with_its_results() -> None:
    x = mge.Parameter([0.5])
    gm, function = GradManager().attach(x), Sigmoid()
    gc.disable()
    try:
        with gm:
            loss = function(x)
            gm.backward(loss)
        copy.deepcopy(function)
        alive = weakref.ref(function)
        del function, loss
        assert alive() is None
    finally:
        gc.enable()


def test_wrong_use_is_explained() -> None:
    untyped: Any = Several()
    with pytest.raises(TypeError, match="op Several expect type Tensor as inputs, got int"):
        untyped(mge.tensor([1.0]), 1)

    class Short(Several):
        def backward(self, first: Tensor | None, second: Tensor | None) -> Any:
            return first

    class Nothing(Several):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return None

    a, b = mge.Parameter([3.0]), mge.Parameter([4.0])
    gm = GradManager().attach([a, b])
    with gm, pytest.raises(TypeError, match="Short.backward returned 1 gradients for 2 inputs"):
        gm.backward(Short()(a, b)[0])
    with pytest.raises(TypeError, match="Nothing.forward returned None; expected a tensor or a tuple"):
        Nothing()(a, b)
    with pytest.raises(NotImplementedError, match="define forward"):
        Function()(a)
