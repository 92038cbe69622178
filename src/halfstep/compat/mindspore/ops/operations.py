"""Primitives: operators with their settings, made once and called often; ``P.MatMul()(a, b)``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeValueError
from halfstep.compat.mindspore.ops.shapes import check_padding, cut, pad_for, same_padding, sizes
from halfstep.errors import UnbuiltError

__all__ = [
    "Add", "AddN", "BatchMatMul", "BiasAdd", "Cast", "Conv2D", "Conv2DBackpropInput", "Conv2DTranspose", "Conv3D",
    "Conv3DTranspose", "Exp", "Flatten", "Ger", "Log", "MatMul", "MaxPool", "Mul", "PReLU", "Primitive", "ReLU",
    "ReduceMean", "ReduceSum", "Reshape", "Softmax", "Sub",
]  # fmt: skip

Size = int | Sequence[int]


class Primitive:
    """An operator with its settings.

    Attributes:
        operators: the torch operators it is carried out by; a white list that names the primitive means these.
    """

    operators: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Compute."""
        return self._compute(*args, **named)

    def _compute(self, *args: Any, **named: Any) -> Any:
        raise UnbuiltError(f"{type(self).__name__} defines no __call__; a Primitive of one's own needs one")

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


# ---------------------------------------------------------------------------------------------------- without settings


class AddN(Primitive):
    """``(xs)``: the sum of a tuple or list of tensors, in the widest of their formats."""

    operators = ("add",)

    def _compute(self, xs: Sequence[Tensor]) -> Tensor:
        return functools.reduce(torch.add, xs)


class PReLU(Primitive):
    """``(x, weight)``: x where positive, weight * x elsewhere."""

    operators, _compute = ("prelu",), staticmethod(F.prelu)


class ReLU(Primitive):
    """``(x)``: max(x, 0)."""

    operators, _compute = ("relu",), staticmethod(F.relu)


class Ger(Primitive):
    """``(x1, x2)``: outer product of two vectors."""

    operators, _compute = ("outer",), staticmethod(torch.outer)


class Add(Primitive):
    """``(x, y)``: x + y."""

    operators, _compute = ("add",), staticmethod(torch.add)


class Sub(Primitive):
    """``(x, y)``: x - y."""

    operators, _compute = ("sub",), staticmethod(torch.sub)


class Mul(Primitive):
    """``(x, y)``: x * y."""

    operators, _compute = ("mul",), staticmethod(torch.mul)


class Exp(Primitive):
    """``(x)``: e to the power of x."""

    operators, _compute = ("exp",), staticmethod(torch.exp)


class Log(Primitive):
    """``(x)``: natural logarithm."""

    operators, _compute = ("log",), staticmethod(torch.log)


class Flatten(Primitive):
    """``(x)``: all dimensions but the first as one."""

    def _compute(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)


class Cast(Primitive):
    """``(x, dtype)``: change of format."""

    def _compute(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)


class Reshape(Primitive):
    """``(x, shape)``: change of shape."""

    def _compute(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape(tuple(shape))


# ------------------------------------------------------------------------------------------------------- with settings


class BatchMatMul(Primitive):
    """Products of matrices in the last two dimensions."""

    operators = ("matmul", "bmm")

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        self.transpose_a, self.transpose_b = transpose_a, transpose_b

    def _compute(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a.mT if self.transpose_a else a, b.mT if self.transpose_b else b)


class MatMul(BatchMatMul):
    """Product of two matrices."""

    operators = ("matmul", "mm")

    def _compute(self, a: Tensor, b: Tensor) -> Tensor:
        if a.dim() != 2 or b.dim() != 2:
            raise MindSporeValueError(f"MatMul takes matrices, got {a.dim()} and {b.dim()} dimensions; use BatchMatMul")
        return super()._compute(a, b)


class _Conv(Primitive):
    dims = 2

    def __init__(
        self, out_channel: int, kernel_size: Size, mode: int = 1, pad_mode: str = "valid", pad: Size = 0,
        stride: Size = 1, dilation: Size = 1, group: int = 1, data_format: str = "",
    ) -> None:  # fmt: skip
        name = type(self).__name__
        if data_format not in ("", "NCHW" if self.dims == 2 else "NCDHW"):
            raise MindSporeValueError(f"{name}: data_format={data_format!r}; channels come second here")
        if mode != 1:
            raise MindSporeValueError(f"{name}: mode={mode!r}; only 1, a plain convolution, exists")
        self.out_channel, self.group, self.pad_mode = out_channel, group, pad_mode
        self.kernel_size = sizes(f"{name}: kernel_size", kernel_size, self.dims)
        self.stride = sizes(f"{name}: stride", stride, self.dims)
        self.dilation = sizes(f"{name}: dilation", dilation, self.dims)
        self.pad = check_padding(name, pad_mode, pad, self.dims)

    def _compute(self, x: Tensor, weight: Tensor) -> Tensor:
        x = pad_for(x, self.pad_mode, self.pad, self.kernel_size, self.stride, self.dilation)
        convolve = F.conv2d if self.dims == 2 else F.conv3d
        result: Tensor = convolve(x, weight, None, self.stride, 0, self.dilation, self.group)
        return result


class Conv2D(_Conv):
    """``(x, weight)``: two-dimensional convolution; the weight is (out, in / group, kernel)."""

    operators = ("conv2d",)


class Conv3D(_Conv):
    """``(x, weight)``: three-dimensional convolution; the weight is (out, in / group, kernel)."""

    dims = 3
    operators = ("conv3d",)


class _Transposed(_Conv):
    """The gradient of a convolution with respect to its input, for a given size of it."""

    def _back(self, dout: Tensor, weight: Tensor, size: Sequence[int]) -> Tensor:
        spatial = tuple(size)[-self.dims :]
        padding: Sequence[int] = self.pad
        if self.pad_mode == "same":
            padding = same_padding(spatial, self.kernel_size, self.stride, self.dilation)
        transpose = F.conv_transpose2d if self.dims == 2 else F.conv_transpose3d
        full = transpose(dout, weight, None, self.stride, 0, 0, self.group, self.dilation)
        for dim, n in enumerate(spatial):
            full = cut(full, dim - self.dims, padding[2 * dim], n)
        return full


class Conv2DTranspose(_Transposed):
    """``(dout, weight, input_size)``: transposed two-dimensional convolution, a tensor of `input_size`."""

    operators = ("conv_transpose2d",)

    def __init__(
        self, out_channel: int, kernel_size: Size, pad_mode: str = "valid", pad: Size = 0,
        pad_list: Sequence[int] | None = None, mode: int = 1, stride: Size = 1, dilation: Size = 1, group: int = 1,
        data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        if pad_list is not None:
            raise MindSporeValueError(f"{type(self).__name__}: pad_list={pad_list!r}; say it by pad_mode='pad' and pad")
        super().__init__(out_channel, kernel_size, mode, pad_mode, pad, stride, dilation, group, data_format)

    def _compute(self, dout: Tensor, weight: Tensor, input_size: Sequence[int] | None = None) -> Tensor:
        if input_size is None:
            raise MindSporeValueError(f"{type(self).__name__}: pass input_size, the shape of the result")
        return self._back(dout, weight, input_size)


class Conv2DBackpropInput(Conv2DTranspose):
    """The same operator under the name of what it is a gradient of."""


class Conv3DTranspose(_Transposed):
    """``(dout, weight)``: transposed three-dimensional convolution of the largest size the settings allow."""

    dims = 3
    operators = ("conv_transpose3d",)

    def __init__(
        self, in_channel: int, out_channel: int, kernel_size: Size, mode: int = 1, pad_mode: str = "valid",
        pad: Size = 0, stride: Size = 1, dilation: Size = 1, group: int = 1, output_padding: Size = 0,
        data_format: str = "NCDHW",
    ) -> None:  # fmt: skip
        super().__init__(out_channel, kernel_size, mode, pad_mode, pad, stride, dilation, group, data_format)
        self.in_channel = in_channel
        if any(sizes("Conv3DTranspose: output_padding", output_padding, 3)):
            raise MindSporeValueError(
                f"Conv3DTranspose: output_padding={output_padding!r} does not exist here; use nn.Conv3dTranspose"
            )

    def _compute(self, dout: Tensor, weight: Tensor) -> Tensor:
        size = []
        settings = zip(dout.shape[-3:], self.kernel_size, self.stride, self.dilation, strict=True)
        for i, (n, k, s, d) in enumerate(settings):
            whole = (n - 1) * s + (k - 1) * d + 1
            size.append(n * s if self.pad_mode == "same" else whole - self.pad[2 * i] - self.pad[2 * i + 1])
        return self._back(dout, weight, size)


class MaxPool(Primitive):
    """``(x)``: two-dimensional maximum pooling."""

    operators = ("max_pool2d",)

    def __init__(
        self, kernel_size: Size = 1, strides: Size = 1, pad_mode: str = "valid", data_format: str = "NCHW"
    ) -> None:
        if data_format != "NCHW":
            raise MindSporeValueError(f"MaxPool: data_format={data_format!r}; channels come second here")
        self.kernel_size = sizes("MaxPool: kernel_size", kernel_size, 2)
        self.strides = sizes("MaxPool: strides", strides, 2)
        self.pad_mode = pad_mode.lower()
        self.pad = check_padding("MaxPool", self.pad_mode, 0, 2)

    def _compute(self, x: Tensor) -> Tensor:
        x = pad_for(x, self.pad_mode, self.pad, self.kernel_size, self.strides, (1, 1), float("-inf"))
        return F.max_pool2d(x, self.kernel_size, self.strides)


class Softmax(Primitive):
    """``(x)``: exp(x) / sum(exp(x)) along an axis."""

    operators = ("softmax",)

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def _compute(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.axis)


class _Reduce(Primitive):
    _reduce: ClassVar[Any]

    def __init__(self, keep_dims: bool = False) -> None:
        self.keep_dims = keep_dims

    def _compute(self, x: Tensor, axis: Size = ()) -> Tensor:
        axes = (axis,) if isinstance(axis, int) else tuple(axis) or tuple(range(x.dim()))
        reduced: Tensor = self._reduce(x, axes, self.keep_dims)
        return reduced


class ReduceMean(_Reduce):
    """``(x, axis=())``: mean over axes; over all of them by default."""

    operators, _reduce = ("mean",), staticmethod(torch.mean)


class ReduceSum(_Reduce):
    """``(x, axis=())``: sum over axes; over all of them by default, over none with `skip_mode`."""

    operators, _reduce = ("sum",), staticmethod(torch.sum)

    def __init__(self, keep_dims: bool = False, skip_mode: bool = False) -> None:
        super().__init__(keep_dims)
        self.skip_mode = skip_mode

    def _compute(self, x: Tensor, axis: Size = ()) -> Tensor:
        skipped = self.skip_mode and not isinstance(axis, int) and not tuple(axis)
        return x if skipped else super()._compute(x, axis)


class BiasAdd(Primitive):
    """``(x, bias)``: add a vector to every channel (dimension 1)."""

    operators = ("add",)

    def __init__(self, data_format: str = "NCHW") -> None:
        if data_format not in ("NCHW", "NCDHW"):
            raise MindSporeValueError(f"BiasAdd: data_format={data_format!r}; channels come second here")

    def _compute(self, x: Tensor, bias: Tensor) -> Tensor:
        return torch.add(x, bias.reshape(-1, *[1] * (x.dim() - 2)))
