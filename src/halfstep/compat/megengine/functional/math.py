"""megengine.functional.math: reductions, products and orders. `axis` is a number, several, or None for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.compat.megengine.functional.nn import check_modes
from halfstep.compat.shared import public
from halfstep.errors import StepError
from halfstep.formats import LOW_DTYPES

__all__ = [
    "argmax", "argmin", "argsort", "cumsum", "dot", "matinv", "matmul", "max", "mean", "min", "norm", "normalize",
    "prod", "sort", "std", "sum", "topk", "var",
]  # fmt: skip

Axis = int | Sequence[int] | None


def _high(inp: Tensor) -> Tensor:
    """Return low numbers and integers as fp32: means are fp32, whether amp is on or off."""
    return inp.float() if inp.dtype in LOW_DTYPES or not inp.dtype.is_floating_point else inp


def _product(inp: Tensor, axes: tuple[int, ...], keepdim: bool) -> Tensor:
    for one in sorted({one % inp.dim() for one in axes}, reverse=True):  # torch takes one axis at a time
        inp = torch.prod(inp, one, keepdim=keepdim)
    return inp


def _reduction(name: str, function: Callable[..., Tensor], meaning: str) -> Callable[..., Any]:
    def reduce(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
        axes = tuple(range(inp.dim())) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        return function(inp, axes, keepdim=keepdims)

    return public(name, reduce, meaning)


def _moment(name: str, function: Callable[..., Tensor], meaning: str, **settings: int) -> Callable[..., Any]:
    return _reduction(name, lambda inp, axes, keepdim: function(_high(inp), axes, keepdim=keepdim, **settings), meaning)


mean = _moment("mean", torch.mean, "Return the mean, in fp32.")
var = _moment("var", torch.var, "Return the variance (of the population), in fp32.", correction=0)
std = _moment("std", torch.std, "Return the standard deviation (of the population), in fp32.", correction=0)
sum = _reduction("sum", torch.sum, "Return the sum.")
prod = _reduction("prod", _product, "Return the product.")
max = _reduction("max", torch.amax, "Return the largest element.")
min = _reduction("min", torch.amin, "Return the smallest element.")


def norm(inp: Tensor, ord: float | None = None, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the vector norm of order `ord`, 2 by default."""
    length: Tensor = torch.norm(inp, 2.0 if ord is None else ord, axis, keepdim=keepdims)
    return length


def normalize(inp: Tensor, ord: float | None = None, axis: int | None = None, eps: float = 1e-12) -> Tensor:
    """Return `inp` divided by its norm along `axis`."""
    if axis is None:
        return inp / norm(inp, ord).clamp_min(eps)
    return F.normalize(inp, 2.0 if ord is None else ord, axis, eps)


def _place(name: str, function: Callable[..., Tensor], meaning: str) -> Callable[..., Any]:
    def find(inp: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
        if axis is not None and not isinstance(axis, int):
            raise StepError(f"{name}(axis={axis!r}): expected one axis or None, for the place in the flattened tensor")
        return function(inp, axis, keepdim=keepdims)

    return public(name, find, meaning)


argmax = _place("argmax", torch.argmax, "Return the place of the largest element.")
argmin = _place("argmin", torch.argmin, "Return the place of the smallest element.")
argsort = public(
    "argsort", lambda inp, descending=False: torch.argsort(inp, descending=descending),
    "Return the order of the elements along the last axis.",
)  # fmt: skip
sort = public(
    "sort", lambda inp, descending=False: tuple(torch.sort(inp, descending=descending)),
    "Return the elements along the last axis in order, and their places.",
)  # fmt: skip
cumsum = public("cumsum", lambda inp, axis: torch.cumsum(inp, axis), "Return the running sum.")
dot = public("dot", lambda inp1, inp2: torch.dot(inp1, inp2), "Return the inner product of two vectors.")
matinv = public("matinv", lambda inp: torch.linalg.inv(inp), "Return the inverse.")


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
