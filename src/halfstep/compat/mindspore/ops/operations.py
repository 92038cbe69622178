"""Primitives: operators with their settings, made once and called often; ``P.MatMul()(a, b)``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeValueError, check_layout, check_value
from halfstep.compat.mindspore.ops.functional import mean, softmax
from halfstep.compat.mindspore.ops.shapes import Size, Windowed, sizes
from halfstep.compat.shared import with_settings
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


def _primitive(name: str, meaning: str, function: Callable[..., Any], *operators: str, **settings: Any) -> Any:
    made = with_settings(Primitive, name, meaning, "_compute", function, **settings)
    made.operators = operators
    return made


def _product(a: Tensor, b: Tensor, *, transpose_a: bool, transpose_b: bool) -> Tensor:
    return torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)


def _matrix_product(a: Tensor, b: Tensor, **transposes: bool) -> Tensor:
    if a.dim() != 2 or b.dim() != 2:
        raise MindSporeValueError(f"MatMul takes matrices, got {a.dim()} and {b.dim()} dimensions; use BatchMatMul")
    return _product(a, b, **transposes)


def _sum(x: Tensor, axis: Size = (), *, keep_dims: bool, skip_mode: bool) -> Tensor:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    return x if skip_mode and not axes else torch.sum(x, axes or tuple(range(x.dim())), keep_dims)


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
BatchMatMul = _primitive(
    "BatchMatMul", "``(a, b)``: products of matrices in the last two dimensions.", _product, "matmul", "bmm",
    transpose_a=False, transpose_b=False,
)  # fmt: skip
MatMul = _primitive(
    "MatMul", "``(a, b)``: product of two matrices.", _matrix_product, "matmul", "mm",
    transpose_a=False, transpose_b=False,
)  # fmt: skip
Softmax = _primitive("Softmax", "``(x)``: exp(x) / sum(exp(x)) along an axis.", softmax, "softmax", axis=-1)
ReduceMean = _primitive(
    "ReduceMean", "``(x, axis=())``: mean over axes; over all of them by default.", mean, "mean", keep_dims=False
)
ReduceSum = _primitive(
    "ReduceSum", "``(x, axis=())``: sum over axes; over all of them by default, over none with `skip_mode`.", _sum,
    "sum", keep_dims=False, skip_mode=False,
)  # fmt: skip


class _Conv(Primitive, Windowed):
    _dims = 2

    def __init__(
        self, out_channel: int, kernel_size: Size, mode: int = 1, pad_mode: str = "valid", pad: Size = 0,
        stride: Size = 1, dilation: Size = 1, group: int = 1, data_format: str = "",
    ) -> None:  # fmt: skip
        name, dims = type(self).__name__, self._dims
        check_layout(name, data_format, "", "NCHW" if dims == 2 else "NCDHW")
        check_value(f"{name}: mode", mode, mode == 1, "1, a plain convolution")
        self.out_channel = out_channel
        self.set_window(name, dims, kernel_size, stride, pad_mode, pad, dilation, group)

    def _compute(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.convolve(x, weight)


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
        return self.input_gradient(dout, weight, tuple(input_size)[-2:])


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
        return self.input_gradient(dout, weight)


class MaxPool(Primitive, Windowed):
    """``(x)``: two-dimensional maximum pooling."""

    operators = ("max_pool2d",)

    def __init__(
        self, kernel_size: Size = 1, strides: Size = 1, pad_mode: str = "valid", data_format: str = "NCHW"
    ) -> None:
        check_layout("MaxPool", data_format, "NCHW")
        self.set_window("MaxPool", 2, kernel_size, strides, pad_mode.lower(), 0)

    def _compute(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.padded(x, float("-inf")), self.kernel_size, self.stride)


class BiasAdd(Primitive):
    """``(x, bias)``: add a vector to every channel (dimension 1)."""

    operators = ("add",)

    def __init__(self, data_format: str = "NCHW") -> None:
        check_layout("BiasAdd", data_format, "NCHW", "NCDHW")

    def _compute(self, x: Tensor, bias: Tensor) -> Tensor:
        return torch.add(x, bias.reshape(-1, *[1] * (x.dim() - 2)))
