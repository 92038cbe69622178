"""Reference of cross entropy on rows of logits: losses and gradients in wide arithmetic, for logits of any format.

With p = softmax(x) over n classes, class weights w (W their sum), smoothing s and y the target,
``loss = (1 - s) w_y (-log p_y) + s/n sum_c w_c (-log p_c)``, and so
``d loss / d x_c = ((1 - s) w_y + s/n W) p_c - (1 - s) w_y [c = y] - s/n w_c``.

Classes are dimension 1 of logits (N, C, ...); targets, losses and their gradients are (N, ...). Wide is fp64 for fp64
and fp32 for everything else. Callers walk along N a part at a time, so that wide tensors stay in a core's cache.
"""

from __future__ import annotations

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


def widened(tensor: Tensor) -> Tensor:
    """Return `tensor` in the format the arithmetic is in: itself if that is its own."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def rows_at_a_time(classes: int, device: str) -> int:
    """Return how many rows of `classes` logits are widened at a time."""
    return max(1, CHUNK.get(device, LARGE_CHUNK) // max(1, classes))


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
    if not smoothing:
        return Shares(label, own, own, scale, None)
    ones = torch.ones(classes, device=grad.device, dtype=grad.dtype) if weight is None else weight
    by_class = smoothing / classes * ones
    return Shares(label, own, own + scale * by_class.sum(), scale, by_class)


def gradient(logits: Tensor, share: Shares) -> Tensor:
    """Return the gradient of `logits`, wide, by operators that have a derivative and rules for torch.func.vmap."""
    label, own, every, scale, by_class = share
    p = torch.softmax(logits, 1, dtype=_wide(logits))
    grad = (p * every.unsqueeze(1)).scatter_add(1, label.unsqueeze(1), -own.unsqueeze(1))
    return grad if by_class is None else grad - _by_class(scale, by_class, logits.dim())


def gradient_into(out: Tensor, logits: Tensor, share: Shares) -> Tensor:
    """Write the gradient of `logits` into `out`, rounded once, and return it; `out` may be `logits`."""
    label, own, every, scale, by_class = share
    p = torch.softmax(logits, 1, dtype=_wide(logits))
    if by_class is None:
        p.scatter_add_(1, label.unsqueeze(1), torch.full_like(own, -1.0).unsqueeze(1))
        last, other = torch.mul, own.unsqueeze(1)
    else:
        p.mul_(every.unsqueeze(1)).scatter_add_(1, label.unsqueeze(1), -own.unsqueeze(1))
        last, other = torch.sub, _by_class(scale, by_class, logits.dim())
    if out.dtype is p.dtype or out.device.type == "cuda":
        return last(p, other, out=out)  # CUDA kernels round what they write; on CPU that is a copy of its own anyway
    return out.copy_(last(p, other, out=p))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _by_class(scale: Tensor, by_class: Tensor, dims: int) -> Tensor:
    return scale.unsqueeze(1) * by_class.view(1, -1, *[1] * (dims - 2))
