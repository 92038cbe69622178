"""Layers that move a window over an image: convolutions and pooling, with MindSpore's `pad_mode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.layers.initial import fill
from halfstep.compat.mindspore.ops.shapes import check_padding, cut, pad_for, sizes

__all__ = [
    "AvgPool2d",
    "Conv1d",
    "Conv1dTranspose",
    "Conv2d",
    "Conv2dTranspose",
    "Conv3d",
    "Conv3dTranspose",
    "MaxPool2d",
]

Size = int | tuple[int, ...]


class _Conv(Cell):
    """A convolution with MindSpore's arguments.

    Args:
        in_channels, out_channels: numbers of channels.
        kernel_size, stride, dilation: one number, or one for each dimension.
        pad_mode: "same" (ceil(size / stride) outputs), "valid" (no padding) or "pad" (`padding`).
        padding: one number, one for each dimension, or two for each.
        group: groups of channels that do not see each other.
        has_bias: whether there is a bias; there is none unless asked for.
        weight_init, bias_init: a tensor, a number, "zeros", "ones", "normal" or None for torch's initialisation.
    """

    kind: ClassVar[Any]
    function: ClassVar[Any]
    dims: ClassVar[int]
    weight: Any
    bias: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        pad_mode: str = "same",
        padding: Size = 0,
        dilation: Size = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        name, dims = type(self).__name__, self.dims
        around = check_padding(name, pad_mode, padding, dims)
        window = sizes(f"{name}: kernel_size", kernel_size, dims)
        steps, spread = sizes(f"{name}: stride", stride, dims), sizes(f"{name}: dilation", dilation, dims)
        self.kind.__init__(
            self, in_channels, out_channels, window, stride=steps, dilation=spread, groups=group, bias=has_bias
        )
        self.training = False
        self.window, self.steps, self.spread, self.around = window, steps, spread, around
        self.pad_mode, self.group, self.has_bias = pad_mode, group, has_bias
        fill(f"{name}: weight_init", self.weight, weight_init)
        fill(f"{name}: bias_init", self.bias, bias_init)

    def construct(self, x: Tensor) -> Tensor:
        """Return the convolution of `x`, (batch, channels, size of each dimension)."""
        x = pad_for(x, self.pad_mode, self.around, self.window, self.steps, self.spread)
        result: Tensor = type(self).function(x, self.weight, self.bias, self.steps, 0, self.spread, self.group)
        return result


class Conv1d(_Conv, nn.Conv1d):
    """One-dimensional convolution."""

    kind, function, dims = nn.Conv1d, staticmethod(F.conv1d), 1


class Conv2d(_Conv, nn.Conv2d):
    """Two-dimensional convolution."""

    kind, function, dims = nn.Conv2d, staticmethod(F.conv2d), 2


class Conv3d(_Conv, nn.Conv3d):
    """Three-dimensional convolution."""

    kind, function, dims = nn.Conv3d, staticmethod(F.conv3d), 3


class _Transposed(_Conv):
    """A transposed convolution; "same" gives stride times as many outputs as inputs."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the transposed convolution of `x`: all of it, of which the padding is cut off."""
        full: Tensor = type(self).function(x, self.weight, None, self.steps, 0, 0, self.group, self.spread)
        for i in range(self.dims):
            axis = i - self.dims
            whole = (x.shape[axis] - 1) * self.steps[i] + (self.window[i] - 1) * self.spread[i] + 1
            if self.pad_mode == "same":
                length = x.shape[axis] * self.steps[i]
                begin = max(whole - length, 0) // 2
            else:
                begin, length = self.around[2 * i], whole - self.around[2 * i] - self.around[2 * i + 1]
            full = cut(full, axis, begin, length)
        return full if self.bias is None else full + self.bias.reshape(-1, *[1] * self.dims)


class Conv1dTranspose(_Transposed, nn.ConvTranspose1d):
    """Transposed one-dimensional convolution."""

    kind, function, dims = nn.ConvTranspose1d, staticmethod(F.conv_transpose1d), 1


class Conv2dTranspose(_Transposed, nn.ConvTranspose2d):
    """Transposed two-dimensional convolution."""

    kind, function, dims = nn.ConvTranspose2d, staticmethod(F.conv_transpose2d), 2


class Conv3dTranspose(_Transposed, nn.ConvTranspose3d):
    """Transposed three-dimensional convolution."""

    kind, function, dims = nn.ConvTranspose3d, staticmethod(F.conv_transpose3d), 3


class _Pool(Cell):
    def __init__(
        self,
        kernel_size: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        pad_mode: str = "valid",
        padding: int | Sequence[int] = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.window = sizes(f"{name}: kernel_size", kernel_size, 2)
        self.steps = sizes(f"{name}: stride", stride, 2)
        self.pad_mode = pad_mode.lower()
        self.around = check_padding(name, self.pad_mode, padding, 2)

    def extra_repr(self) -> str:
        """Show the settings, not MindSpore's defaults: stride is 1 unless given."""
        return f"kernel_size={self.window}, stride={self.steps}, pad_mode={self.pad_mode!r}"


class MaxPool2d(_Pool):
    """Maximum of each window. The stride is 1 unless given, as in MindSpore and not as in torch."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the pooled `x`."""
        x = pad_for(x, self.pad_mode, self.around, self.window, self.steps, (1, 1), float("-inf"))
        return F.max_pool2d(x, self.window, self.steps)


class AvgPool2d(_Pool):
    """Mean of each window, of what is inside the image. The stride is 1 unless given."""

    def construct(self, x: Tensor) -> Tensor:
        """Return the pooled `x`."""
        padded = pad_for(x, self.pad_mode, self.around, self.window, self.steps, (1, 1))
        if padded is x:
            return F.avg_pool2d(x, self.window, self.steps)
        inside = pad_for(torch.ones_like(x), self.pad_mode, self.around, self.window, self.steps, (1, 1))
        return F.avg_pool2d(padded, self.window, self.steps) / F.avg_pool2d(inside, self.window, self.steps)
