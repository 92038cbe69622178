# mypy: ignore-errors
"""Cross entropy of rows of logits in Triton: two launches, and nothing wide is written but one loss a row.

One program a row, which it reads in blocks: once for the maximum and the sum of exponentials (kept running, Milakov
and Gimelshein, arXiv:1805.02867), and in the backward pass once more, from cache, for the gradient, rounded as it is
written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.triton.tables import FAITHFUL, on

__all__ = ["gradient", "losses"]

BLOCK = 4096
"""Logits a program works on at a time."""

OPTIONS = {**FAITHFUL, "num_warps": 8}


@triton.jit
def _lse(row, weight, CLASSES: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    """Return log(sum(exp(x))) of a row and, for smoothing, the sums of w and of w * x."""
    top = -float("inf")
    total = 0.0
    weights = 0.0
    dot = 0.0
    for begin in range(0, CLASSES, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < CLASSES
        x = tl.load(row + places, mask=inside, other=-float("inf")).to(tl.float32)
        above = tl.maximum(top, tl.max(x, 0))
        base = tl.where(above == -float("inf"), 0.0, above)  # -inf minus itself would be nan
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = above
        if SMOOTHED:
            w = tl.load(weight + places, mask=inside, other=0.0) if WEIGHTED else tl.where(inside, 1.0, 0.0)
            weights += tl.sum(w, 0)
            dot += tl.sum(tl.where(inside, w * x, 0.0), 0)
    return top + tl.log(total), weights, dot


@triton.jit
def _rounded(wide, BF16: tl.constexpr):
    """Round half to even to the numbers of bf16: Triton's interpreter cuts off where a GPU rounds."""
    if BF16:
        bits = wide.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        wide = tl.where(wide != wide, bits, even).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def losses_kernel(
    logits,
    stride,
    target,
    weight,
    out,
    ignored,
    smoothing,
    CLASSES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the loss of one row; a target that is no class gives nan."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    label = tl.load(target + index)
    lse, weights, dot = _lse(row, weight, CLASSES, WEIGHTED, SMOOTHED, BLOCK)
    known = (label >= 0) & (label < CLASSES)
    x = tl.load(row + label, mask=known, other=float("nan")).to(tl.float32)
    loss = lse - x
    if WEIGHTED:
        loss *= tl.load(weight + label, mask=known, other=0.0)
    if SMOOTHED:
        loss = (1.0 - smoothing) * loss + smoothing / CLASSES * (weights * lse - dot)
    tl.store(out + index, tl.where(label == ignored, 0.0, loss))


@triton.jit
def gradient_kernel(
    logits,
    stride,
    out,
    out_stride,
    labels,
    own,
    every,
    scale,
    by_class,
    CLASSES: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of one row's logits."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    label = tl.load(labels + index)
    lse, _, _ = _lse(row, logits, CLASSES, False, False, BLOCK)
    lse = tl.where((label >= 0) & (label < CLASSES), lse, float("nan"))
    taken = tl.load(own + index)
    factor = tl.load(every + index)
    if SMOOTHED:
        share = tl.load(scale + index)
    for begin in range(0, CLASSES, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < CLASSES
        x = tl.load(row + places, mask=inside, other=-float("inf")).to(tl.float32)
        grad = tl.exp(x - lse) * factor - tl.where(places == label, taken, 0.0)
        if SMOOTHED:
            grad -= share * tl.load(by_class + places, mask=inside, other=0.0)
        low = _rounded(grad, BF16).to(out.dtype.element_ty)
        tl.store(out + index * out_stride + places, low, mask=inside)


def losses(logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float) -> Tensor:
    """Return the fp32 loss of every row of logits (N, C), whose classes lie side by side."""
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        with on(logits.device):
            losses_kernel[(len(logits),)](
                logits,
                logits.stride(0),
                target.contiguous(),
                out if weight is None else weight.contiguous(),
                out,
                ignored,
                smoothing,
                CLASSES=logits.shape[1],
                WEIGHTED=weight is not None,
                SMOOTHED=smoothing > 0.0,
                BLOCK=_block(logits),
                **OPTIONS,
            )
    return out


def gradient(
    logits: Tensor, label: Tensor, own: Tensor, every: Tensor, scale: Tensor, by_class: Tensor | None
) -> Tensor:
    """Return the gradient of logits (N, C) in their format, rounded once; the rest are the fields of `Shares`."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if len(logits):
        with on(logits.device):
            gradient_kernel[(len(logits),)](
                logits,
                logits.stride(0),
                out,
                out.stride(0),
                label.contiguous(),
                own.contiguous(),
                every.contiguous(),
                scale.contiguous(),
                own if by_class is None else by_class.contiguous(),
                CLASSES=logits.shape[1],
                SMOOTHED=by_class is not None,
                BF16=out.dtype is torch.bfloat16,
                BLOCK=_block(logits),
                **OPTIONS,
            )
    return out


def _block(logits: Tensor) -> int:
    return min(BLOCK, int(triton.next_power_of_2(logits.shape[1])))
