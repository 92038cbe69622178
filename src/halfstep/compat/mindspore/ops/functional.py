"""Functions of ``mindspore.ops`` that a training step, a loss or a network like LeNet-5 uses."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import halfstep as hs
from halfstep.compat.mindspore.checks import MindSporeTypeError, check_type, check_value
from halfstep.compat.mindspore.ops.shapes import Size, Windowed
from halfstep.compat.shared import public

__all__ = [
    "cast", "conv2d", "depend", "flatten", "log_softmax", "matmul", "max_pool2d", "mean", "mixed_precision_cast",
    "one_hot", "ones_like", "partial", "relu", "reshape", "softmax", "square", "stop_gradient", "zeros_like",
]  # fmt: skip

partial = functools.partial

matmul = public(torch.matmul, lambda input, other: torch.matmul(input, other))
square = public(torch.square, lambda input: torch.square(input))
relu = public(F.relu, lambda input, inplace=False: F.relu(input, inplace))
ones_like = public(torch.ones_like, lambda input, *, dtype=None: torch.ones_like(input, dtype=dtype))
zeros_like = public(torch.zeros_like, lambda input, *, dtype=None: torch.zeros_like(input, dtype=dtype))
softmax = public(F.softmax, lambda input, axis=-1, *, dtype=None: F.softmax(input, axis, dtype=dtype))
log_softmax = public(F.log_softmax, lambda logits, axis=-1: F.log_softmax(logits, axis))
reshape = public(torch.reshape, lambda input, shape: input.reshape(tuple(shape)))
stop_gradient = public(torch.Tensor.detach, lambda value: value.detach(), "stop_gradient")


def depend(value: Tensor, expr: object) -> Tensor:
    """Return `value`; torch runs things in the order they are written, so `expr` has happened."""
    return value


def mean(x: Tensor, axis: Size | None = None, keep_dims: bool = False) -> Tensor:
    """Return the mean along `axis`; of everything by default."""
    axes = tuple(range(x.dim())) if axis is None or axis == () else axis if isinstance(axis, int) else tuple(axis)
    return torch.mean(x, axes, keep_dims)


def max_pool2d(
    x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1,
    return_indices: bool = False, ceil_mode: bool = False,
) -> Any:  # fmt: skip
    """Return the maximum of each window, and with `return_indices` the places; the stride is the window by default."""
    pool: Any = F.max_pool2d  # its overloads are by the value of return_indices
    return pool(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1, pad_mode: str = "valid",
    padding: Size = 0, dilation: Size = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the convolution of images (batch, in, height, width).

    Args:
        input: the images.
        weight: (out, in / groups, height, width).
        bias: one for each output channel.
        stride: one number or two.
        pad_mode: "same", "valid" or "pad".
        padding: for "pad": one number, two, or four.
        dilation: one number or two.
        groups: groups of channels that do not see each other.
    """
    window = Windowed()
    window.set_window("conv2d", 2, tuple(weight.shape[2:]), stride, pad_mode, padding, dilation, groups)
    return window.convolve(input, weight, bias)


def cast(input: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return `input` in `dtype`."""
    check_type("cast: dtype", dtype, torch.dtype, "one of mindspore.dtype, such as mstype.float16")
    return torch.as_tensor(input).to(dtype)


def mixed_precision_cast(dst_type: torch.dtype, x: Any) -> Any:
    """Return `x` with its floating tensors in `dst_type`, also those in tuples, lists and dicts."""
    if not isinstance(dst_type, torch.dtype) or not dst_type.is_floating_point:
        raise MindSporeTypeError(
            f"mixed_precision_cast: dst_type={dst_type!r}; expected the format first: (mstype.float16, x)"
        )
    return hs.trees.map_tensors(x, lambda tensor: tensor.to(dst_type) if tensor.is_floating_point() else tensor)


def flatten(input: Tensor, order: str = "C", *, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    """Return `input` with the dimensions from `start_dim` to `end_dim` as one."""
    check_value("flatten: order", order, order == "C", "'C', in which torch's tensors are read")
    return torch.flatten(input, start_dim, end_dim)


def one_hot(
    indices: Tensor, depth: int, on_value: Tensor | float = 1, off_value: Tensor | float = 0, axis: int = -1
) -> Tensor:
    """Return `on_value` at `indices` along a new axis and `off_value` elsewhere, in the format of `on_value`."""
    hot = F.one_hot(indices.long(), depth).bool().movedim(-1, axis)
    on, off = (torch.as_tensor(value, device=indices.device) for value in (on_value, off_value))
    return torch.where(hot, on, off.to(on.dtype))
