"""megengine.functional.math: reductions, products and orders. `axis` is a number, several, or None for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.compat.megengine.functional.conv import check_compute_mode
from halfstep.errors import StepError
from halfstep.formats import LOW_DTYPES

__all__ = [
    "argmax", "argmin", "argsort", "cumsum", "dot", "matinv", "matmul", "max", "mean", "min", "norm", "normalize",
    "prod", "sort", "std", "sum", "topk", "var",
]  # fmt: skip

Axis = int | Sequence[int] | None


def _axes(inp: Tensor, axis: Axis) -> tuple[int, ...]:
    return tuple(range(inp.dim())) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)


def _high(inp: Tensor) -> Tensor:
    """Return low numbers and integers as fp32: means are fp32, whether amp is on or off."""
    return inp.float() if inp.dtype in LOW_DTYPES or not inp.dtype.is_floating_point else inp


def mean(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean, in fp32."""
    return torch.mean(_high(inp), _axes(inp, axis), keepdim=keepdims)


def var(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the variance (of the population), in fp32."""
    return torch.var(_high(inp), _axes(inp, axis), correction=0, keepdim=keepdims)


def std(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the standard deviation (of the population), in fp32."""
    return torch.std(_high(inp), _axes(inp, axis), correction=0, keepdim=keepdims)


def sum(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum."""
    return torch.sum(inp, _axes(inp, axis), keepdim=keepdims)


def prod(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the product."""
    axes = sorted({one % inp.dim() for one in _axes(inp, axis)}, reverse=True)
    for one in axes:  # torch takes one axis at a time
        inp = torch.prod(inp, one, keepdim=keepdims)
    return inp


def max(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest element."""
    return torch.amax(inp, _axes(inp, axis), keepdim=keepdims)


def min(inp: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element."""
    return torch.amin(inp, _axes(inp, axis), keepdim=keepdims)


def norm(inp: Tensor, ord: float | None = None, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the vector norm of order `ord`, 2 by default."""
    length: Tensor = torch.norm(inp, 2.0 if ord is None else ord, axis, keepdim=keepdims)
    return length


def normalize(inp: Tensor, ord: float | None = None, axis: int | None = None, eps: float = 1e-12) -> Tensor:
    """Return `inp` divided by its norm along `axis`."""
    if axis is None:
        return inp / norm(inp, ord).clamp_min(eps)
    return F.normalize(inp, 2.0 if ord is None else ord, axis, eps)


def argmax(inp: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the place of the largest element."""
    return torch.argmax(inp, _one_axis("argmax", axis), keepdim=keepdims)


def argmin(inp: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the place of the smallest element."""
    return torch.argmin(inp, _one_axis("argmin", axis), keepdim=keepdims)


def argsort(inp: Tensor, descending: bool = False) -> Tensor:
    """Return the order of the elements along the last axis."""
    return torch.argsort(inp, descending=descending)


def sort(inp: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return the elements along the last axis in order, and their places."""
    values, places = torch.sort(inp, descending=descending)
    return values, places


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


def cumsum(inp: Tensor, axis: int) -> Tensor:
    """Return the running sum."""
    return torch.cumsum(inp, axis)


def matmul(
    inp1: Tensor, inp2: Tensor, transpose_a: bool = False, transpose_b: bool = False, compute_mode: str = "default"
) -> Tensor:
    """Return the matrix product; a vector is not transposed."""
    check_compute_mode("matmul", compute_mode)
    left = inp1.mT if transpose_a and inp1.dim() > 1 else inp1
    return torch.matmul(left, inp2.mT if transpose_b and inp2.dim() > 1 else inp2)


def dot(inp1: Tensor, inp2: Tensor) -> Tensor:
    """Return the inner product of two vectors."""
    return torch.dot(inp1, inp2)


def matinv(inp: Tensor) -> Tensor:
    """Return the inverse."""
    inverse: Any = torch.linalg.inv(inp)
    return inverse  # type: ignore[no-any-return]


def _one_axis(where: str, axis: Any) -> int | None:
    if axis is None or isinstance(axis, int):
        return axis
    raise StepError(f"{where}(axis={axis!r}): expected one axis or None, for the place in the flattened tensor")
