"""Losses of a linear layer's outputs, a part of the rows at a time: the logits of all are never there, nor saved.

Over a large vocabulary the logits are most of what a language model saves. Here the input of the last layer is saved,
as low as it is, and its weight, which is there anyway; the logits of some rows at a time are computed in the forward
pass and once more in the backward pass: a fourth product where three are needed, for which what is kept does not grow
with the vocabulary.

The gradients of the weight and the bias are summed in fp32 over the parts and rounded once. (The chunked losses of
Liger, github.com/linkedin/Liger-Kernel, and of torch, nn.LinearCrossEntropyOptions, compute gradients in the forward
pass: they keep as many bytes as the weight has, have no second derivative, and do not know the loss's scale yet, so
that small gradients round to 0 in fp16.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from halfstep.cast.arithmetic.functions import apply, plain
from halfstep.cast.losses.cross_entropy import differentiated
from halfstep.kernels.choose import losses, rounded_gradient
from halfstep.kernels.reference.cross_entropy import Shares, gradient, parts, shares, widened

__all__ = ["losses_of_rows"]


def losses_of_rows(*arguments: Any) -> Tensor:
    """Return the wide loss of every row; the arguments are those of `LinearCrossEntropy.forward`."""
    if torch.compiler.is_compiling():
        call: Any = LinearCrossEntropy.apply
        return call(*arguments)  # type: ignore[no-any-return]
    return apply(LinearCrossEntropy, *arguments)


class LinearCrossEntropy(Function):
    """Unreduced cross entropy (N,) of ``F.linear(input, linear_weight, linear_bias)`` with class indices (N,)."""

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
        chunk: int,
        emulating: bool,
    ) -> Tensor:
        product = _Product(linear_weight, linear_bias, emulating)
        found = [
            losses(product.logits(x), labels, weight, ignored, smoothing) for x, labels in parts(chunk, (input, target))
        ]
        return torch.cat(found) if len(found) > 1 else found[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.ignored, ctx.smoothing, ctx.chunk, ctx.emulating = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        input, linear_weight, linear_bias, target, weight = ctx.saved_tensors
        device = input.device.type
        with torch.autocast(device, enabled=False) if torch.compiler.is_compiling() else plain(device):
            share = shares(grads[0], target, weight, ctx.ignored, ctx.smoothing, len(linear_weight))
            if differentiated(grads[0]):
                found = _differentiable(input, linear_weight, linear_bias, share)
            else:
                product = _Product(linear_weight, linear_bias, ctx.emulating)
                found = _gradients(product, input, share, ctx.chunk, ctx.needs_input_grad[:3])
        return *found, None, None, None, None, None, None


class _Product:
    """The weight and bias of a linear layer, ready to be applied to one part of its input after the other.

    Emulating means: fp32 arithmetic, each result rounded once to the low format.
    """

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
            total.add_(torch.mm(grad, input, out_dtype=torch.float32))
        else:
            total.add_(torch.mm(grad, input))  # no kernel gives fp32: each part is rounded, their sum is not


def _gradients(
    product: _Product, input: Tensor, share: Shares, chunk: int, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias that are needed, part by part."""
    wide = torch.float64 if input.dtype is torch.float64 else torch.float32
    need_input, need_weight, need_bias = needs
    of_input = torch.empty_like(input) if need_input else None
    summed = need_weight and chunk < len(input)  # one product accumulates in fp32 by itself
    of_weight = torch.zeros_like(product.weight, dtype=wide) if summed else None
    of_bias = torch.zeros_like(product.weight[:, 0], dtype=wide) if need_bias else None
    places = input if of_input is None else of_input
    for (x, place), of_part in zip(parts(chunk, (input, places)), share.parts(chunk), strict=True):
        grad = rounded_gradient(product.logits(x), of_part)
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
