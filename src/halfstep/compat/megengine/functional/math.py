"""megengine.functional.math: reductions, products, orders, the metric. `axis`: a number, several, or None for all."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.compat.megengine.functional.nn import check_modes
from halfstep.compat.shared import public
from halfstep.errors import StepError
from halfstep.formats import LOW_DTYPES

__all__ = [
    "argmax", "argmin", "argsort", "cumsum", "dot", "matinv", "matmul", "max", "mean", "min", "norm", "normalize",
    "prod", "sort", "std", "sum", "topk", "topk_accuracy", "var",
]  # fmt: skip

Axis = int | Sequence[int] | None


def _high(inp: Tensor) -> Tensor:
    """Return low numbers and integers as fp32: means are fp32, whether amp is on or off."""
    return inp.float() if inp.dtype in LOW_DTYPES or not inp.dtype.is_floating_point else inp


def _product(inp: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return the product."""
    for one in sorted({one % inp.dim() for one in axes}, reverse=True):  # torch takes one axis at a time
        inp = torch.prod(inp, one, keepdim=keepdim)
    return inp


def _reduction(
    function: Callable[..., Tensor], name: str, meaning: str = "", *, high: bool = False, **options: Any
) -> Callable[..., Any]:
    def reduce(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
        axes = tuple(range(inp.dim())) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        return function(_high(inp) if high else inp, axes, keepdim=keepdims, **options)

    reduce.__doc__ = meaning
    return public(function, reduce, name)


mean = _reduction(torch.mean, "mean", "Return the mean, in fp32.", high=True)
var = _reduction(torch.var, "var", "Return the variance (of the population), in fp32.", high=True, correction=0)
std = _reduction(torch.std, "std", "Return the deviation (of the population), in fp32.", high=True, correction=0)
sum = _reduction(torch.sum, "sum")
prod = _reduction(_product, "prod")
max = _reduction(torch.amax, "max")
min = _reduction(torch.amin, "min")


def norm(inp: Tensor, ord: float | None = None, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the vector norm of order `ord`, 2 by default."""
    return cast(Tensor, torch.norm(inp, 2.0 if ord is None else ord, axis, keepdim=keepdims))


def normalize(inp: Tensor, ord: float | None = None, axis: int | None = None, eps: float = 1e-12) -> Tensor:
    """Return `inp` divided by its norm along `axis`."""
    return inp / norm(inp, ord, axis, keepdims=axis is not None).clamp_min(eps)


def _place(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def find(inp: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
        if axis is not None and not isinstance(axis, int):
            raise StepError(
                f"{function.__name__}(axis={axis!r}): expected one axis or None, for the place in the flattened tensor"
            )
        return function(inp, axis, keepdim=keepdims)

    return public(function, find)


argmax = _place(torch.argmax)
argmin = _place(torch.argmin)
argsort = public(torch.argsort, lambda inp, descending=False: torch.argsort(inp, descending=descending))
sort = public(torch.sort, lambda inp, descending=False: tuple(torch.sort(inp, descending=descending)))
cumsum = public(torch.cumsum, lambda inp, axis: torch.cumsum(inp, axis))
dot = public(torch.dot, lambda inp1, inp2: torch.dot(inp1, inp2))
matinv = public(torch.linalg.inv, lambda inp: torch.linalg.inv(inp), "matinv")


def topk(
    inp: Tensor, k: int, descending: bool = True, kth_only: bool = False, no_sort: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the `k` largest (without `descending`: smallest) elements along the last axis, and their places.

    Args:
        inp: any tensor.
        k: how many.
        descending: the largest; False: the smallest. (Until MegEngine 1.12 False was the default.)
        kth_only: only the k-th.
        no_sort: in any order.
    """
    values, places = torch.topk(inp, k, largest=descending, sorted=not no_sort or kth_only)
    return (values[..., -1], places[..., -1]) if kth_only else (values, places)


def matmul(
    inp1: Tensor, inp2: Tensor, transpose_a: bool = False, transpose_b: bool = False, compute_mode: str = "default"
) -> Tensor:
    """Return the matrix product; a vector is not transposed."""
    check_modes("matmul", compute_mode)
    left = inp1.mT if transpose_a and inp1.dim() > 1 else inp1
    return torch.matmul(left, inp2.mT if transpose_b and inp2.dim() > 1 else inp2)


def topk_accuracy(logits: Tensor, target: Tensor, topk: int | Sequence[int] = 1) -> Tensor | list[Tensor]:
    """Return the share of samples whose label is among the `topk` largest logits, one for each number."""
    counts = [topk] if isinstance(topk, int) else list(topk)
    best = torch.topk(logits, sorted(counts)[-1], dim=-1).indices
    hits = best == target.long().unsqueeze(-1)
    shares = [hits[..., :count].any(-1).float().mean() for count in counts]
    return shares[0] if isinstance(topk, int) else shares
