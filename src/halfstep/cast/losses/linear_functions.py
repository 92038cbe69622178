"""The two autograd functions of `linear_loss`: cross entropy of a linear layer's outputs, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from halfstep.cast.arithmetic.rounded import rules_off
from halfstep.cast.losses.cross_entropy import differentiated
from halfstep.errors import LossError
from halfstep.kernels.choose import losses, rounded_gradient
from halfstep.kernels.reference.cross_entropy import (
    Shares,
    gradient,
    parts,
    reduced,
    shares,
    widened,
)
from halfstep.torch_private.modes import is_legacy_batchedtensor


def _no_rules(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.compiler.is_compiling() else rules_off(device)


class GradientsAhead(Function):
    """Reduced cross entropy of a linear layer, with those gradients of input, weight and bias that `needs` names."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        ignored: int,
        smoothing: float,
        reduction: str,
        chunk: int,
        needs: tuple[bool, ...],
    ) -> Tensor:
        """Return the loss, 0-dim and wide; keep its gradients."""
        one = torch.ones((), dtype=widened(input[:0]).dtype, device=input.device)
        share = shares(one, target, weight, ignored, smoothing, len(linear_weight), reduction)
        product = _LinearLayer(linear_weight, linear_bias, emulating=False)
        found: list[Tensor] = []

        def look(logits: Tensor, labels: Tensor) -> None:
            found.append(losses(logits, labels, weight, ignored, smoothing))

        ctx.save_for_backward(*_gradients(product, input, target, share, chunk, needs, look))
        return reduced(torch.cat(found), target, weight, ignored, reduction)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients that were kept, times the one that arrives; a second derivative is a LossError."""
        if torch.is_grad_enabled():
            raise LossError(
                "linear_cross_entropy computed its gradients in the forward pass, and they have no derivative; call it "
                "with recompute=True where backward runs with create_graph=True"
            )
        with _no_rules(grads[0].device.type):
            found = [None if g is None else _scaled(g, grads[0]) for g in ctx.saved_tensors]
        return *found, None, None, None, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return ``gradient * factor``, rounded once; `factor` is 0-dim and wide."""
    if gradient.device.type == "cpu" or is_legacy_batchedtensor(factor):
        return gradient * factor
    return torch.mul(gradient, factor.view(1), out=torch.empty_like(gradient))  # a 0-dim factor is rounded first


class LinearCrossEntropy(Function):
    """Cross entropy of ``F.linear(input, linear_weight, linear_bias)`` with class indices (N,)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        ignored: int,
        smoothing: float,
        reduction: str,
        chunk: int,
        emulating: bool,
    ) -> Tensor:
        """Return the loss, wide: 0-dim, or (N,) if it is not reduced."""
        product = _LinearLayer(linear_weight, linear_bias, emulating)
        taken = parts(chunk, (input, target))
        found = [losses(product.logits(x), labels, weight, ignored, smoothing) for x, labels in taken]
        return reduced(torch.cat(found) if len(found) > 1 else found[0], target, weight, ignored, reduction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the arguments."""
        *tensors, ctx.ignored, ctx.smoothing, ctx.reduction, ctx.chunk, ctx.emulating = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias, from logits that are computed again."""
        input, linear_weight, linear_bias, target, weight = ctx.saved_tensors
        device = input.device.type
        with _no_rules(device):
            share = shares(grads[0], target, weight, ctx.ignored, ctx.smoothing, len(linear_weight), ctx.reduction)
            if differentiated(grads[0]):
                found = _differentiable(input, linear_weight, linear_bias, share)
            else:
                product = _LinearLayer(linear_weight, linear_bias, ctx.emulating)
                found = _gradients(product, input, target, share, ctx.chunk, ctx.needs_input_grad[:3])
        return *found, None, None, None, None, None, None, None


class _LinearLayer:
    """The weight and bias of a linear layer; emulating: fp32 arithmetic, each result rounded once to the low format."""

    def __init__(self, weight: Tensor, bias: Tensor | None, emulating: bool) -> None:
        self.low = weight.dtype
        self.bias_low = None if bias is None else bias.dtype
        self.emulating = emulating
        self.weight = weight.float() if emulating else weight
        self.bias = bias if bias is None or not emulating else bias.float()

    def operand(self, low: Tensor) -> Tensor:
        return low.float() if self.emulating else low

    def logits(self, input: Tensor) -> Tensor:
        return F.linear(self.operand(input), self.weight, self.bias).to(self.low)

    def onto(self, total: Tensor, grad: Tensor, input: Tensor) -> None:
        """Add ``grad.T @ input`` to `total`, which is wide."""
        grad = grad.t()
        if total.dtype == grad.dtype:
            total.addmm_(grad, input)
        elif total.device.type == "cuda":
            torch.addmm(total, grad, input, out_dtype=torch.float32, out=total)
        else:
            total.add_(torch.mm(grad, input))  # no kernel gives fp32: each part is rounded, their sum is not


def _gradients(
    product: _LinearLayer,
    input: Tensor,
    target: Tensor,
    share: Shares,
    chunk: int,
    needs: tuple[bool, ...],
    look: Callable[[Tensor, Tensor], None] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias that are needed; `look` gets each part's logits and targets."""
    wide = torch.float64 if input.dtype is torch.float64 else torch.float32
    need_input, need_weight, need_bias = needs
    of_input = torch.empty_like(input) if need_input else None
    summed = need_weight and chunk < len(input)  # one product accumulates in fp32 by itself
    of_weight = torch.zeros_like(product.weight, dtype=wide) if summed else None
    of_bias = torch.zeros_like(product.weight[:, 0], dtype=wide) if need_bias else None
    places = input if of_input is None else of_input
    for (x, place, labels), of_part in zip(parts(chunk, (input, places, target)), share.parts(chunk), strict=True):
        logits = product.logits(x)
        if look is not None:
            look(logits, labels)
        grad = rounded_gradient(logits, of_part)
        if of_bias is not None:
            of_bias += grad.sum(0, dtype=wide)
        grad = product.operand(grad)
        if of_input is not None and product.emulating:
            place.copy_(torch.mm(grad, product.weight))
        elif of_input is not None:
            torch.mm(grad, product.weight, out=place)
        if of_weight is not None:
            product.onto(of_weight, grad, product.operand(x))
        elif need_weight:
            of_weight = torch.mm(grad.t(), product.operand(x))
    return (
        of_input,
        None if of_weight is None else of_weight.to(product.low),
        None if of_bias is None else of_bias.to(product.low),
    )


def _differentiable(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, share: Shares
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return all three gradients from all logits at once, by operators that have a derivative; nothing is rounded."""
    x, weight = widened(input), widened(linear_weight)
    bias = None if linear_bias is None else widened(linear_bias)
    grad = gradient(F.linear(x, weight, bias), share)
    of_bias = None if linear_bias is None else grad.sum(0).to(linear_bias.dtype)
    return (grad @ weight).to(input.dtype), (grad.t() @ x).to(linear_weight.dtype), of_bias
