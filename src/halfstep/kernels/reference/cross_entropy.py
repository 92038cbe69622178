"""Reference of cross entropy on rows of logits: losses and gradients in wide arithmetic, for logits of any format.

With p = softmax(x) over n classes, class weights w (W their sum), smoothing s and y the target,
``loss = (1 - s) w_y (-log p_y) + s/n sum_c w_c (-log p_c)``, and so
``d loss / d x_c = ((1 - s) w_y + s/n W) p_c - (1 - s) w_y [c = y] - s/n w_c``.

Classes are dimension 1 of logits (N, C, ...); targets, losses and their gradients are (N, ...). Wide is fp64 for fp64
and fp32 for everything else. Callers walk along N a part at a time, so that wide tensors stay in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

REDUCTIONS = ("mean", "sum", "none")

CHUNK = {"cpu": 1 << 20}
"""Device type -> elements widened at a time. On a CPU 4 MiB of fp32: 2**18 to 2**20 take the same time, and from 2**21
on, where every part is fresh memory, six times as long (4096 classes, one core)."""

LARGE_CHUNK = 1 << 24
"""The same for accelerators, where launches should be few."""


class Shares(NamedTuple):
    """What the targets of some rows do to their gradients; the first four are (N, ...)."""

    label: Tensor  # the target class, 0 where it is ignored
    own: Tensor  # what the target's class takes off
    every: Tensor  # factor of the probabilities
    scale: Tensor  # gradient of the row's loss, 0 where its target is ignored
    by_class: Tensor | None  # (C,) what label smoothing takes off every class, over `scale`

    def parts(self, rows: int) -> Iterator[Shares]:
        """Walk along the rows, `rows` at a time."""
        for label, own, every, scale in parts(rows, self[:4]):
            yield Shares(label, own, every, scale, self.by_class)


class RowSums(NamedTuple):
    """What rows of logits add up to, (N,) each: for all classes, or for those that have been counted so far."""

    lse: Tensor  # log of the sum of exponentials
    own: Tensor  # the logit of the target; nan where its class has not been counted, or is none
    dot: Tensor  # sum of `by_class` times logits; arbitrary without label smoothing


def widened(tensor: Tensor) -> Tensor:
    """Return `tensor` in the format the arithmetic is in: itself if that is its own."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def parts(rows: int, tensors: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
    """Walk along the first dimension of `tensors`, which is the same in all, `rows` at a time."""
    if rows >= len(tensors[0]):
        return [tensors]
    return zip(*(t.split(rows) for t in tensors), strict=True)


def losses(logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float) -> Tensor:
    """Return the loss of every target, wide; on CPU bit for bit what torch computes from widened logits."""
    if smoothing:
        return F.cross_entropy(
            widened(logits), target, weight, ignore_index=ignored, reduction="none", label_smoothing=smoothing
        )
    log_probabilities = torch.log_softmax(logits, 1, dtype=_wide(logits))  # on CUDA one kernel reads low, writes wide
    return F.nll_loss(log_probabilities, target, weight, ignore_index=ignored, reduction="none")


def row_sums(
    logits: Tensor, target: Tensor, by_class: Tensor | None, first: int = 0, before: RowSums | None = None
) -> RowSums:
    """Return the sums of rows: of logits (N, C), whose classes begin with `first`, and of those `before` them."""
    x = widened(logits)
    inside, place = _places(target, first, x.shape[1])
    own = torch.where(inside, x.gather(1, place.unsqueeze(1)).squeeze(1), math.nan if before is None else before.own)
    lse = torch.logsumexp(x, 1)
    dot = torch.zeros_like(lse) if by_class is None else x @ by_class[first : first + x.shape[1]]
    return RowSums(lse, own, dot) if before is None else RowSums(before.lse.logaddexp(lse), own, before.dot + dot)


def _places(label: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return whether labels are among the `count` classes from `first` on, and their places there, else 0."""
    place = label - first
    inside = (place >= 0) & (place < count)
    return inside, torch.where(inside, place, 0)


def losses_of_sums(
    sums: RowSums, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float, by_class: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of every target, and `sums.lse`, which its gradient needs; both nan for one that is no class."""
    counts = target.ne(ignored)
    each = sums.lse - sums.own
    if weight is not None:
        each = each * weight.take(torch.where(counts, target, 0))
    if by_class is not None:
        each = (1.0 - smoothing) * each + (by_class.sum(dtype=each.dtype) * sums.lse - sums.dot)
    each = torch.where(counts, each, 0.0)
    return each, torch.where(each.isnan(), math.nan, sums.lse)


def smoothed(smoothing: float, weight: Tensor | None, classes: int, like: Tensor) -> Tensor | None:
    """Return what label smoothing makes of the weight of every class, (classes,), wide; None without it."""
    if not smoothing:
        return None
    ones = torch.ones(classes, device=like.device, dtype=_wide(like)) if weight is None else weight
    return smoothing / classes * ones


def refuse_no_class(target: Tensor, classes: int, ignored: int) -> None:
    """Raise torch's error for a target on a CPU that is no class; elsewhere its loss and gradients are nan."""
    if target.device.type == "cpu":
        nothing = torch.zeros((), device="cpu").expand(len(target), classes)
        F.nll_loss(nothing, target, ignore_index=ignored, reduction="none")


def reduced(each: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str) -> Tensor:
    """Return the losses `each` of targets, reduced as torch does: a mean is over the weights of those that count."""
    if reduction == "none":
        return each
    return each.sum() / _counted(target, weight, ignored) if reduction == "mean" else each.sum()


def _counted(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    counts = target.ne(ignored)
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight.take(torch.where(counts, target, 0)), 0.0).sum()


def shares(
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignored: int,
    smoothing: float,
    classes: int,
    reduction: str = "none",
) -> Shares:
    """Return what `target` and `grad`, that of the reduced loss, make of the gradients of `classes` logits."""
    if reduction == "mean":
        grad = grad / _counted(target, weight, ignored)
    counts = target.ne(ignored)
    scale = torch.where(counts, grad, 0.0)
    label = torch.where(counts, target, 0)
    own = scale * (1.0 - smoothing) if smoothing else scale
    own = own if weight is None else own * weight.take(label)
    by_class = smoothed(smoothing, weight, classes, grad)
    every = own if by_class is None else own + scale * by_class.sum()
    return Shares(label, own, every, scale, by_class)


def gradient(logits: Tensor, share: Shares) -> Tensor:
    """Return the gradient of `logits`, wide, by operators that have a derivative and rules for torch.func.vmap."""
    label, own, every, scale, by_class = share
    p = torch.softmax(logits, 1, dtype=_wide(logits))
    grad = (p * every.unsqueeze(1)).scatter_add(1, label.unsqueeze(1), -own.unsqueeze(1))
    return grad if by_class is None else grad - _by_class(scale, by_class, logits.dim())


def gradient_into(out: Tensor, logits: Tensor, share: Shares, lse: Tensor | None = None, first: int = 0) -> Tensor:
    """Write the gradient of `logits` into `out`, rounded once, and return it; `out` may be `logits`.

    Given `lse`, of the rows' sums, `logits` are of the classes from `first` on.
    """
    label, own, every, scale, by_class = share
    p = torch.softmax(logits, 1, dtype=_wide(logits)) if lse is None else (logits - lse.unsqueeze(1)).exp_()
    inside, label = _places(label, first, logits.shape[1])
    minus = -inside.to(own.dtype)
    if by_class is None:
        p.scatter_add_(1, label.unsqueeze(1), minus.unsqueeze(1))
        last, other = torch.mul, own.unsqueeze(1)
    else:
        p.mul_(every.unsqueeze(1)).scatter_add_(1, label.unsqueeze(1), (minus * own).unsqueeze(1))
        last, other = torch.sub, _by_class(scale, by_class[first : first + logits.shape[1]], logits.dim())
    if out.dtype is p.dtype or out.device.type == "cuda":
        return last(p, other, out=out)  # CUDA kernels round what they write; on CPU that is a copy of its own anyway
    return out.copy_(last(p, other, out=p))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _by_class(scale: Tensor, by_class: Tensor, dims: int) -> Tensor:
    return scale.unsqueeze(1) * by_class.view(1, -1, *[1] * (dims - 2))
