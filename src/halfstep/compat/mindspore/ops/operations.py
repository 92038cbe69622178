"""Primitives: operators with their settings, made once and called often; ``P.MatMul()(a, b)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeValueError
from halfstep.compat.mindspore.ops.shapes import Size, check_padding, convolve, pad_for, sizes, transposed
from halfstep.errors import UnbuiltError

__all__ = [
    "Add", "AddN", "BatchMatMul", "BiasAdd", "Cast", "Conv2D", "Conv2DBackpropInput", "Conv2DTranspose", "Conv3D",
    "Conv3DTranspose", "Exp", "Flatten", "Ger", "Log", "MatMul", "MaxPool", "Mul", "PReLU", "Primitive", "ReLU",
    "ReduceMean", "ReduceSum", "Reshape", "Softmax", "Sub",
]  # fmt: skip


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


def _primitive(name: str, meaning: str, function: Callable[..., Any], *operators: str) -> type[Primitive]:
    body = {"__doc__": meaning, "__module__": __name__, "operators": operators, "_compute": staticmethod(function)}
    return type(name, (Primitive,), body)


Add = _primitive("Add", "``(x, y)``: x + y.", torch.add, "add")
Sub = _primitive("Sub", "``(x, y)``: x - y.", torch.sub, "sub")
Mul = _primitive("Mul", "``(x, y)``: x * y.", torch.mul, "mul")
Exp = _primitive("Exp", "``(x)``: e to the power of x.", torch.exp, "exp")
Log = _primitive("Log", "``(x)``: natural logarithm.", torch.log, "log")
Ger = _primitive("Ger", "``(x1, x2)``: outer product of two vectors.", torch.outer, "outer")
ReLU = _primitive("ReLU", "``(x)``: max(x, 0).", F.relu, "relu")
PReLU = _primitive("PReLU", "``(x, weight)``: x where positive, weight * x elsewhere.", F.prelu, "prelu")
Cast = _primitive("Cast", "``(x, dtype)``: change of format.", lambda x, dtype: x.to(dtype))
Reshape = _primitive("Reshape", "``(x, shape)``: change of shape.", lambda x, shape: x.reshape(tuple(shape)))
Flatten = _primitive("Flatten", "``(x)``: all dimensions but the first as one.", lambda x: torch.flatten(x, 1))
AddN = _primitive(
    "AddN", "``(xs)``: the sum of a tuple or list of tensors, in the widest of their formats.",
    lambda xs: functools.reduce(torch.add, xs), "add",
)  # fmt: skip


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
    _dims = 2

    def __init__(
        self, out_channel: int, kernel_size: Size, mode: int = 1, pad_mode: str = "valid", pad: Size = 0,
        stride: Size = 1, dilation: Size = 1, group: int = 1, data_format: str = "",
    ) -> None:  # fmt: skip
        name, dims = type(self).__name__, self._dims
        if data_format not in ("", "NCHW" if dims == 2 else "NCDHW"):
            raise MindSporeValueError(f"{name}: data_format={data_format!r}; channels come second here")
        if mode != 1:
            raise MindSporeValueError(f"{name}: mode={mode!r}; only 1, a plain convolution, exists")
        self.out_channel, self.group, self.pad_mode = out_channel, group, pad_mode
        self.kernel_size = sizes(f"{name}: kernel_size", kernel_size, dims)
        self.stride = sizes(f"{name}: stride", stride, dims)
        self.dilation = sizes(f"{name}: dilation", dilation, dims)
        self.pad = check_padding(name, pad_mode, pad, dims)

    def _compute(self, x: Tensor, weight: Tensor) -> Tensor:
        return convolve(x, weight, None, self.pad_mode, self.pad, self.stride, self.dilation, self.group)


class Conv2D(_Conv):
    """``(x, weight)``: two-dimensional convolution; the weight is (out, in / group, kernel)."""

    operators = ("conv2d",)


class Conv3D(_Conv):
    """``(x, weight)``: three-dimensional convolution; the weight is (out, in / group, kernel)."""

    operators, _dims = ("conv3d",), 3


class Conv2DTranspose(_Conv):
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
        size = tuple(input_size)[-2:]
        return transposed(dout, weight, self.pad_mode, self.pad, self.stride, self.dilation, self.group, size)


class Conv2DBackpropInput(Conv2DTranspose):
    """The same operator under the name of what it is a gradient of."""


class Conv3DTranspose(_Conv):
    """``(dout, weight)``: transposed three-dimensional convolution of the largest size the settings allow."""

    operators, _dims = ("conv_transpose3d",), 3

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
        return transposed(dout, weight, self.pad_mode, self.pad, self.stride, self.dilation, self.group)


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
    _reduce: ClassVar[Callable[..., Tensor]]

    def __init__(self, keep_dims: bool = False) -> None:
        self.keep_dims = keep_dims

    def _compute(self, x: Tensor, axis: Size = ()) -> Tensor:
        axes = (axis,) if isinstance(axis, int) else tuple(axis) or tuple(range(x.dim()))
        return self._reduce(x, axes, self.keep_dims)


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
