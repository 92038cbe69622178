"""Losses that keep low inputs for the backward pass instead of fp32 copies of them.

cross_entropy over a vocabulary is the largest tensor of a language model: torch saves fp32 log-probabilities, twice the
bytes of the bf16 logits they came from. Here the logits themselves are saved, as they are; the fp32 probabilities of a
few rows at a time are made again in the backward pass. The losses of the rows are those torch
computes from ``logits.float()``, bit for bit; the gradient is the fp32 gradient rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from halfstep.cast.emulate import apply, plain

__all__ = ["cross_entropy"]

LOWS = frozenset({torch.float16, torch.bfloat16})
CHUNK = {"cpu": 1 << 18}  # elements widened at a time: 1 MiB of fp32 stays in a core's cache (measured: 2**17 to 2**20)
LARGE_CHUNK = 1 << 24  # on accelerators: launches should be few


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy in fp32 of low logits; what is saved for backward is the low logits.

    Args:
        input: logits, (C,) or (N, C, ...); fp16 or bf16 take the way described above, fp32 torch's own.
        target: class indices, () or (N, ...); class probabilities take torch's own way.
        weight: (C,) or None.
        size_average: torch's old spelling of `reduction`.
        ignore_index: a target that does not count.
        reduce: torch's old spelling of `reduction`.
        reduction: "mean", "sum" or "none".
        label_smoothing: from 0 to 1.

    Returns:
        fp32: 0-dim, or with reduction="none" of the shape of `target`.
    """
    wide_weight = None if weight is None else weight.float()
    lean = (
        input.dtype in LOWS
        and input.dim() > 1
        and target.dtype is torch.long
        and target.shape == input.shape[:1] + input.shape[2:]
        and input.numel() > 0
        and size_average is None
        and reduce is None
        and not (weight is not None and weight.requires_grad)
        and reduction in {"mean", "sum", "none"}
        and 0.0 <= label_smoothing <= 1.0
        and not torch.compiler.is_compiling()  # a compiler fuses the widening into the loss by itself
        and torch.autograd.forward_ad._current_level < 0
        and not input.is_nested
    )
    if not lean:
        target = target.float() if target.dtype in LOWS else target
        return F.cross_entropy(
            input.float(), target, wide_weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    each = apply(_CrossEntropy, input, target, wide_weight, ignore_index, label_smoothing)
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    counts = target != ignore_index
    if wide_weight is None:
        return each.sum() / counts.sum()
    return each.sum() / torch.where(counts, wide_weight.take(torch.where(counts, target, 0)), 0.0).sum()


def _rows(logits: Tensor) -> int:
    """Return how many rows of `logits` are widened at a time."""
    return max(1, CHUNK.get(logits.device.type, LARGE_CHUNK) * len(logits) // logits.numel())


def _parts(rows: int, tensors: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
    """Walk along the first dimension of `tensors`, which is the same in all, `rows` at a time."""
    if rows >= len(tensors[0]):
        return [tensors]
    return zip(*(t.split(rows) for t in tensors), strict=True)


class _CrossEntropy(Function):
    """Unreduced cross entropy of low logits (N, C, ...) with class indices (N, ...)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float) -> Tensor:
        losses = [
            F.cross_entropy(
                part.float(), labels, weight, ignore_index=ignored, reduction="none", label_smoothing=smoothing
            )
            for part, labels in _parts(_rows(logits), (logits, target))
        ]
        return torch.cat(losses) if len(losses) > 1 else losses[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logits, target, weight, ctx.ignored, ctx.smoothing = inputs
        ctx.save_for_backward(logits, target, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        logits, target, weight = ctx.saved_tensors
        with plain(logits.device.type):
            if torch.is_grad_enabled():
                grad = _differentiable(grads[0], logits, target, weight, ctx.ignored, ctx.smoothing)
            else:
                grad = _gradient(grads[0], logits, target, weight, ctx.ignored, ctx.smoothing)
        return grad, None, None, None, None


def _differentiable(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float
) -> Tensor:
    """Return the gradient by torch's own operators, so that it has a derivative itself."""

    def loss(wide: Tensor) -> Tensor:
        return F.cross_entropy(wide, target, weight, ignore_index=ignored, reduction="none", label_smoothing=smoothing)

    pull = torch.func.vjp(loss, logits.float())[1]
    return cast(Tensor, pull(grad)[0].to(logits.dtype))


def _gradient(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float
) -> Tensor:
    """Return d(loss)/d(logits), rounded once.

    With p = softmax(x), n classes, class weights w (W their sum), smoothing s and y the target,
    ``loss = (1 - s) w_y (-log p_y) + s/n sum_c w_c (-log p_c)``, and so
    ``d loss / d x_c = ((1 - s) w_y + s/n W) p_c - (1 - s) w_y [c = y] - s/n w_c``.
    """
    classes = logits.shape[1]
    counts = target != ignored
    scale = torch.where(counts, grad, 0.0)  # of each target, 0 where it is ignored
    index = torch.where(counts, target, 0)
    on_target = scale * (1.0 - smoothing) * (1.0 if weight is None else weight.take(index))
    spread = smoothing / classes
    by_class = None if not spread else spread * (torch.ones(classes, device=grad.device) if weight is None else weight)
    on_all = on_target if by_class is None else on_target + scale * by_class.sum()
    out = torch.empty_like(logits)
    wholes = (out, logits, index, on_target, on_all, scale)
    for result, x, label, own, every, factor in _parts(_rows(logits), wholes):
        p = torch.softmax(x, 1, dtype=torch.float32)
        p *= every.unsqueeze(1)
        p.scatter_add_(1, label.unsqueeze(1), -own.unsqueeze(1))
        if by_class is not None:
            p -= factor.unsqueeze(1) * by_class.view(1, -1, *[1] * (logits.dim() - 2))
        result.copy_(p)
    return out
