"""Functions of ``mindspore.ops`` that a training step, a loss or a network like LeNet-5 uses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "cast",
    "depend",
    "flatten",
    "log_softmax",
    "matmul",
    "max_pool2d",
    "mean",
    "one_hot",
    "ones_like",
    "partial",
    "relu",
    "reshape",
    "softmax",
    "square",
    "stop_gradient",
    "zeros_like",
]

matmul = torch.matmul
mean = torch.mean
ones_like = torch.ones_like
relu = F.relu
square = torch.square
zeros_like = torch.zeros_like
max_pool2d = F.max_pool2d


def cast(x: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype`."""
    return torch.as_tensor(x).to(dtype)


def depend(value: Tensor, expr: object) -> Tensor:
    """Return `value`; torch runs things in the order they are written, so `expr` has happened."""
    return value


def flatten(x: Tensor, order: str = "C", *, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    """Return `x` with the dimensions from `start_dim` to `end_dim` as one."""
    if order != "C":
        raise ValueError(f"flatten: order={order!r}; torch's tensors are read in order 'C'")
    return torch.flatten(x, start_dim, end_dim)


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return exp(x) / sum(exp(x)) along `axis`."""
    return F.softmax(x, axis)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Return the logarithm of the softmax along `axis`."""
    return F.log_softmax(x, axis)


def one_hot(indices: Tensor, depth: int, on_value: float = 1.0, off_value: float = 0.0) -> Tensor:
    """Return float32 rows with `on_value` at `indices` and `off_value` elsewhere."""
    return torch.where(F.one_hot(indices.long(), depth).bool(), float(on_value), float(off_value)).float()


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x` in `shape`."""
    return x.reshape(tuple(shape))


def stop_gradient(x: Tensor) -> Tensor:
    """Return `x` without its history."""
    return x.detach()
