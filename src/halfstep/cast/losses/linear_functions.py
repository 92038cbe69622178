"""The two autograd functions of `linear_loss`: cross entropy of a linear layer's outputs, a part of them at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from halfstep.cast.arithmetic.rounded import rules_off
from halfstep.cast.losses.cross_entropy import differentiated
from halfstep.errors import LossError
from halfstep.kernels.choose import gradient_into, losses, row_sums
from halfstep.kernels.reference.cross_entropy import (
    Shares,
    gradient,
    losses_of_sums,
    parts,
    reduced,
    refuse_no_class,
    shares,
    smoothed,
    widened,
)


def _no_rules(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if torch.compiler.is_compiling() else rules_off(device)


class GradientsAhead(Function):
    """Reduced cross entropy of a linear layer, with those gradients of input, weight and bias that `needs` names.

    Parts are rows. The gradients of the weight and the bias are summed in fp32 over them and rounded once.
    """

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
        rows: int,
        needs: tuple[bool, ...],
    ) -> Tensor:
        """Return the loss, 0-dim and wide; keep its gradients."""
        layer = _LinearLayer(linear_weight, linear_bias, emulating=False)
        one = torch.ones((), dtype=layer.wide, device=input.device)
        share = shares(one, target, weight, ignored, smoothing, layer.classes, reduction)
        found, into = [], _Gradients(layer, input, needs, rows, layer.classes)
        for n, ((x, labels), of_part) in enumerate(zip(parts(rows, (input, target)), share.parts(rows), strict=True)):
            logits = layer.logits(x)
            each, lse = losses(logits, labels, weight, ignored, smoothing)
            found.append(each)
            into.add(gradient_into(logits, logits, of_part, lse), row=n * rows)
        ctx.save_for_backward(*into.rounded())
        return reduced(torch.cat(found), target, weight, ignored, reduction).to(layer.wide)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients that were kept, times the one that arrives; a second derivative is a LossError."""
        if torch.is_grad_enabled():
            raise LossError(
                "linear_cross_entropy computed its gradients in the forward pass, and they have no derivative; call it "
                "with recompute=True where backward runs with create_graph=True"
            )
        with _no_rules(grads[0].device.type):
            found = [None if g is None else g * grads[0] for g in ctx.saved_tensors]
        return *found, None, None, None, None, None, None, None


class LinearCrossEntropy(Function):
    """Cross entropy of ``F.linear(input, linear_weight, linear_bias)`` with class indices (N,).

    Parts are classes, `count` of them. The forward pass sums exponentials over the parts, and keeps the log of their
    sum. Out of it and a part's logits, computed again, the backward pass makes their gradient, which overwrites them:
    the part's gradients of weight and bias are complete, and the input's is summed in fp32 and rounded once.
    """

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
        count: int,
        emulating: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, wide: 0-dim, or (N,) if it is not reduced; and `RowSums.lse`."""
        layer = _LinearLayer(linear_weight, linear_bias, emulating)
        refuse_no_class(target, layer.classes, ignored)
        by_class = smoothed(smoothing, weight, layer.classes, input)
        sums = row_sums(layer.logits(input, 0, count), target, by_class)
        for first in range(count, layer.classes, count):
            sums = row_sums(layer.logits(input, first, count), target, by_class, first, sums)
        each, lse = losses_of_sums(sums, target, weight, ignored, smoothing, by_class)
        return reduced(each, target, weight, ignored, reduction).to(layer.wide), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the arguments, and what the exponentials sum up to."""
        *tensors, ctx.ignored, ctx.smoothing, ctx.reduction, ctx.count, ctx.emulating = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias, from logits that are computed again."""
        input, linear_weight, linear_bias, target, weight, lse = ctx.saved_tensors
        device = input.device.type
        with _no_rules(device):
            share = shares(grads[0], target, weight, ctx.ignored, ctx.smoothing, len(linear_weight), ctx.reduction)
            if differentiated(grads[0]):
                found = _differentiable(input, linear_weight, linear_bias, share)
            else:
                layer = _LinearLayer(linear_weight, linear_bias, ctx.emulating)
                into = _Gradients(layer, input, ctx.needs_input_grad[:3], len(input), ctx.count)
                for first in range(0, layer.classes, ctx.count):
                    logits = layer.logits(input, first, ctx.count)
                    into.add(gradient_into(logits, logits, share, lse, first), first=first)
                found = into.rounded()
        return *found, None, None, None, None, None, None, None


class _LinearLayer:
    """The weight and bias of a linear layer; emulating: fp32 arithmetic, each result rounded once to the low format."""

    def __init__(self, weight: Tensor, bias: Tensor | None, emulating: bool) -> None:
        self.low, self.wide, self.classes = weight.dtype, widened(weight[:0]).dtype, len(weight)
        self.emulating = emulating
        self.weight = weight.float() if emulating else weight
        self.bias = bias if bias is None or not emulating else bias.float()

    def operand(self, low: Tensor) -> Tensor:
        return low.float() if self.emulating else low

    def logits(self, input: Tensor, first: int = 0, count: int | None = None) -> Tensor:
        """Return the logits of `count` classes from `first` on."""
        some = slice(first, None if count is None else first + count)
        bias = None if self.bias is None else self.bias[some]
        return F.linear(self.operand(input), self.weight[some], bias).to(self.low)


class _Gradients:
    """The gradients of input, weight and bias that are needed, made of those of the logits of one part after another.

    Each part has `rows` rows and `classes` classes. What several parts add to is wide, and rounded once at the end.
    """

    def __init__(self, layer: _LinearLayer, input: Tensor, needs: tuple[bool, ...], rows: int, classes: int) -> None:
        self.layer, self.input, self.rows, self.classes = layer, input, rows, classes
        whole = (classes >= layer.classes, rows >= len(input), False)
        room = zip((input, layer.weight, layer.weight[:, 0]), needs, whole, strict=True)
        self.found = [
            torch.empty_like(t, dtype=layer.weight.dtype if complete else layer.wide) if needed else None
            for t, needed, complete in room
        ]

    def add(self, grad: Tensor, row: int = 0, first: int = 0) -> None:
        """Take the gradient of the logits of a part: from a row, and the `first` class, on."""
        rows, classes = slice(row, row + self.rows), slice(first, first + self.classes)
        of_input, of_weight, of_bias = self.found
        if of_bias is not None:
            _put(of_bias[classes], grad.sum(0, dtype=of_bias.dtype), added=row > 0)
        grad = self.layer.operand(grad)
        if of_input is not None:
            _put_product(of_input[rows], grad, self.layer.weight[classes], added=first > 0)
        if of_weight is not None:
            _put_product(of_weight[classes], grad.t(), self.layer.operand(self.input[rows]), added=row > 0)

    def rounded(self) -> list[Tensor | None]:
        """Return the gradients."""
        return [None if t is None else t.to(self.layer.low) for t in self.found]


def _put(out: Tensor, found: Tensor, *, added: bool) -> None:
    out.add_(found) if added else out.copy_(found)


def _put_product(out: Tensor, one: Tensor, other: Tensor, *, added: bool) -> None:
    """Write ``one @ other`` to `out`, which may be wide, or add it."""
    kinds: dict[str, Any] = {} if out.dtype == one.dtype else {"out_dtype": out.dtype}
    if kinds and out.device.type != "cuda":
        _put(out, torch.mm(one, other), added=added)  # no kernel gives fp32: each part is rounded, their sum is not
    elif added:
        torch.addmm(out, one, other, out=out, **kinds)
    else:
        torch.mm(one, other, out=out, **kinds)


def _differentiable(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, share: Shares
) -> list[Tensor | None]:
    """Return all three gradients from all logits at once, by operators that have a derivative; nothing is rounded."""
    x, weight = widened(input), widened(linear_weight)
    bias = None if linear_bias is None else widened(linear_bias)
    grad = gradient(F.linear(x, weight, bias), share)
    of_bias = None if linear_bias is None else grad.sum(0).to(linear_bias.dtype)
    return [(grad @ weight).to(input.dtype), (grad.t() @ x).to(linear_weight.dtype), of_bias]
