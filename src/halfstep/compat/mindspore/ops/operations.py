"""Primitives: operators with their settings, made once and called often; ``P.MatMul()(a, b)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.compat.mindspore.errors import MindSporeValueError
from halfstep.compat.mindspore.ops.shapes import check_padding, cut, pad_for, sizes
from halfstep.errors import UnbuiltError

__all__ = [
    "Add",
    "BatchMatMul",
    "BiasAdd",
    "Cast",
    "Conv2D",
    "Conv2DBackpropInput",
    "Conv2DTranspose",
    "Conv3D",
    "Conv3DTranspose",
    "Exp",
    "Flatten",
    "Ger",
    "Log",
    "MatMul",
    "MaxPool",
    "Mul",
    "PReLU",
    "Primitive",
    "ReLU",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Softmax",
    "Sub",
]


class Primitive:
    """An operator with its settings.

    Attributes:
        operators: the torch operators it is carried out by; a white list that names the primitive means these.
    """

    operators: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *args: Any) -> Any:
        """Compute."""
        raise UnbuiltError(f"{type(self).__name__} defines no __call__; a Primitive of one's own needs one")

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


class _Product(Primitive):
    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        self.transpose_a, self.transpose_b = transpose_a, transpose_b

    def _turned(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a.mT if self.transpose_a else a), (b.mT if self.transpose_b else b)


class MatMul(_Product):
    """Product of two matrices."""

    operators = ("matmul", "mm")

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b."""
        if a.dim() != 2 or b.dim() != 2:
            raise MindSporeValueError(f"MatMul takes matrices, got {a.dim()} and {b.dim()} dimensions; use BatchMatMul")
        return torch.matmul(*self._turned(a, b))


class BatchMatMul(_Product):
    """Products of matrices in the last two dimensions."""

    operators = ("matmul", "bmm")

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b."""
        return torch.matmul(*self._turned(a, b))


class _Conv(Primitive):
    dims = 2

    def __init__(
        self,
        out_channel: int,
        kernel_size: int | Sequence[int],
        mode: int = 1,
        pad_mode: str = "valid",
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        group: int = 1,
        data_format: str = "",
    ) -> None:
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

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution of `x` with `weight` (out, in / group, kernel)."""
        x = pad_for(x, self.pad_mode, self.pad, self.kernel_size, self.stride, self.dilation)
        convolve = F.conv2d if self.dims == 2 else F.conv3d
        result: Tensor = convolve(x, weight, None, self.stride, 0, self.dilation, self.group)
        return result


class Conv2D(_Conv):
    """Two-dimensional convolution."""

    operators = ("conv2d",)


class Conv3D(_Conv):
    """Three-dimensional convolution."""

    dims = 3
    operators = ("conv3d",)


class _Transposed(_Conv):
    """The gradient of a convolution with respect to its input, for a given size of it."""

    def _back(self, dout: Tensor, weight: Tensor, size: Sequence[int]) -> Tensor:
        spatial = tuple(size)[-self.dims :]
        padding = self.pad
        if self.pad_mode == "same":
            padding = ()
            for n, k, s, d in zip(spatial, self.kernel_size, self.stride, self.dilation, strict=True):
                total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
                padding += (total // 2, total - total // 2)
        transpose = F.conv_transpose2d if self.dims == 2 else F.conv_transpose3d
        full = transpose(dout, weight, None, self.stride, 0, 0, self.group, self.dilation)
        for dim, n in enumerate(spatial):
            full = cut(full, dim - self.dims, padding[2 * dim], n)
        return full


class Conv2DTranspose(_Transposed):
    """Transposed two-dimensional convolution; ``(dout, weight, input_size)``."""

    operators = ("conv_transpose2d",)

    def __init__(
        self, out_channel: int, kernel_size: int | Sequence[int], pad_mode: str = "valid",
        pad: int | Sequence[int] = 0, pad_list: Sequence[int] | None = None, mode: int = 1,
        stride: int | Sequence[int] = 1, dilation: int | Sequence[int] = 1, group: int = 1, data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        if pad_list is not None:
            raise MindSporeValueError(f"{type(self).__name__}: pad_list={pad_list!r}; say it by pad_mode='pad' and pad")
        super().__init__(out_channel, kernel_size, mode, pad_mode, pad, stride, dilation, group, data_format)

    def __call__(self, dout: Tensor, weight: Tensor, input_size: Sequence[int] | None = None) -> Tensor:
        """Return a tensor of `input_size`."""
        if input_size is None:
            raise MindSporeValueError(f"{type(self).__name__}: pass input_size, the shape of the result")
        return self._back(dout, weight, input_size)


class Conv2DBackpropInput(Conv2DTranspose):
    """The same operator under the name of what it is a gradient of."""


class Conv3DTranspose(_Transposed):
    """Transposed three-dimensional convolution; the result has the largest size the settings allow."""

    dims = 3
    operators = ("conv_transpose3d",)

    def __init__(
        self, in_channel: int, out_channel: int, kernel_size: int | Sequence[int], mode: int = 1,
        pad_mode: str = "valid", pad: int | Sequence[int] = 0, stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1, group: int = 1, output_padding: int | Sequence[int] = 0,
        data_format: str = "NCDHW",
    ) -> None:  # fmt: skip
        super().__init__(out_channel, kernel_size, mode, pad_mode, pad, stride, dilation, group, data_format)
        self.in_channel = in_channel
        if any(sizes("Conv3DTranspose: output_padding", output_padding, 3)):
            raise MindSporeValueError(
                f"Conv3DTranspose: output_padding={output_padding!r} does not exist here; use nn.Conv3dTranspose"
            )

    def __call__(self, dout: Tensor, weight: Tensor) -> Tensor:
        """Return the transposed convolution of `dout`."""
        size = []
        for i, (n, k, s, d) in enumerate(
            zip(dout.shape[-3:], self.kernel_size, self.stride, self.dilation, strict=True)
        ):
            whole = (n - 1) * s + (k - 1) * d + 1
            size.append(n * s if self.pad_mode == "same" else whole - self.pad[2 * i] - self.pad[2 * i + 1])
        return self._back(dout, weight, size)


class PReLU(Primitive):
    """x where positive, weight * x elsewhere."""

    operators = ("prelu",)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the activation of `x`."""
        return F.prelu(x, weight)


class ReLU(Primitive):
    """max(x, 0)."""

    operators = ("relu",)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of `x`."""
        return F.relu(x)


class Ger(Primitive):
    """Outer product of two vectors."""

    operators = ("outer",)

    def __call__(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return the matrix x1[i] * x2[j]."""
        return torch.outer(x1, x2)


class Flatten(Primitive):
    """All dimensions but the first as one."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return a matrix."""
        return torch.flatten(x, 1)


class MaxPool(Primitive):
    """Two-dimensional maximum pooling."""

    operators = ("max_pool2d",)

    def __init__(
        self, kernel_size: int | Sequence[int] = 1, strides: int | Sequence[int] = 1, pad_mode: str = "valid",
        data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        if data_format != "NCHW":
            raise MindSporeValueError(f"MaxPool: data_format={data_format!r}; channels come second here")
        self.kernel_size = sizes("MaxPool: kernel_size", kernel_size, 2)
        self.strides = sizes("MaxPool: strides", strides, 2)
        self.pad_mode = pad_mode.lower()
        self.pad = check_padding("MaxPool", self.pad_mode, 0, 2)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the maximum of each window."""
        x = pad_for(x, self.pad_mode, self.pad, self.kernel_size, self.strides, (1, 1), float("-inf"))
        return F.max_pool2d(x, self.kernel_size, self.strides)


class Softmax(Primitive):
    """exp(x) / sum(exp(x)) along an axis."""

    operators = ("softmax",)

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def __call__(self, x: Tensor) -> Tensor:
        """Return the softmax of `x`."""
        return F.softmax(x, self.axis)


class Cast(Primitive):
    """Change of format."""

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `x` in `dtype`."""
        return x.to(dtype)


class Reshape(Primitive):
    """Change of shape."""

    def __call__(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Return `x` in `shape`."""
        return x.reshape(tuple(shape))


class _Reduce(Primitive):
    def __init__(self, keep_dims: bool = False) -> None:
        self.keep_dims = keep_dims

    def _axes(self, x: Tensor, axis: int | Sequence[int]) -> tuple[int, ...]:
        return (axis,) if isinstance(axis, int) else tuple(axis) or tuple(range(x.dim()))


class ReduceMean(_Reduce):
    """Mean over axes; over all of them by default."""

    operators = ("mean",)

    def __call__(self, x: Tensor, axis: int | Sequence[int] = ()) -> Tensor:
        """Return the mean of `x`."""
        return torch.mean(x, self._axes(x, axis), self.keep_dims)


class ReduceSum(_Reduce):
    """Sum over axes; over all of them by default."""

    operators = ("sum",)

    def __init__(self, keep_dims: bool = False, skip_mode: bool = False) -> None:
        super().__init__(keep_dims)
        self.skip_mode = skip_mode

    def __call__(self, x: Tensor, axis: int | Sequence[int] = ()) -> Tensor:
        """Return the sum of `x`; with `skip_mode` and no axes, `x` itself."""
        if self.skip_mode and not isinstance(axis, int) and not tuple(axis):
            return x
        return torch.sum(x, self._axes(x, axis), self.keep_dims)


class Add(Primitive):
    """x + y."""

    operators = ("add",)

    def __call__(self, x: Tensor, y: Tensor | float) -> Tensor:
        """Return the sum."""
        return torch.add(x, y)


class Sub(Primitive):
    """x - y."""

    operators = ("sub",)

    def __call__(self, x: Tensor, y: Tensor | float) -> Tensor:
        """Return the difference."""
        return torch.sub(x, y)


class Mul(Primitive):
    """x * y."""

    operators = ("mul",)

    def __call__(self, x: Tensor, y: Tensor | float) -> Tensor:
        """Return the product."""
        return torch.mul(x, y)


class BiasAdd(Primitive):
    """Add a vector to every channel (dimension 1)."""

    operators = ("add",)

    def __init__(self, data_format: str = "NCHW") -> None:
        if data_format not in ("NCHW", "NCDHW"):
            raise MindSporeValueError(f"BiasAdd: data_format={data_format!r}; channels come second here")

    def __call__(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the sum."""
        return torch.add(x, bias.reshape(-1, *[1] * (x.dim() - 2)))


class Exp(Primitive):
    """e to the power of x."""

    operators = ("exp",)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the power."""
        return torch.exp(x)


class Log(Primitive):
    """Natural logarithm."""

    operators = ("log",)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logarithm."""
        return torch.log(x)
