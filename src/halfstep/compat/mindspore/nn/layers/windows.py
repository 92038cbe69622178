"""Layers that move a window over an image: convolutions and pooling, with MindSpore's `pad_mode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeValueError, check_only
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.layers.basic import Layer
from halfstep.compat.mindspore.ops.shapes import check_padding, cut, pad_for, sizes

__all__ = [
    "AvgPool2d", "Conv1d", "Conv1dTranspose", "Conv2d", "Conv2dTranspose", "Conv3d", "Conv3dTranspose", "MaxPool2d",
]  # fmt: skip

Size = int | tuple[int, ...]
LAYOUTS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}
LAYOUT_REMEDY = "transpose the input, or use torch.channels_last"


class _Conv(Layer):
    """A convolution with MindSpore's arguments.

    Args:
        in_channels, out_channels: numbers of channels.
        kernel_size, stride, dilation: one number, or one for each dimension.
        pad_mode: "same" (ceil(size / stride) outputs), "valid" (no padding) or "pad" (`padding`).
        padding: one number, one for each dimension, or two for each.
        group: groups of channels that do not see each other.
        has_bias: whether there is a bias; there is none unless asked for.
        weight_init, bias_init: a tensor, a number, "zeros", "ones", "normal" (or another name of
            `common.initializer`), an Initializer, or None for torch's initialisation, which is MindSpore's.
        data_format: channels come second.
        dtype: format of the weights.
    """

    function: ClassVar[Any]
    dims: ClassVar[int]
    weight: Any
    bias: Any

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False, weight_init: Any = None,
        bias_init: Any = None, data_format: str = "", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        name, dims = type(self).__name__, self.dims
        if data_format != "":
            check_only(name, "data_format", data_format, LAYOUTS[dims], LAYOUT_REMEDY)
        self.around = check_padding(name, pad_mode, padding, dims)
        self.window = sizes(f"{name}: kernel_size", kernel_size, dims)
        self.steps, self.spread = sizes(f"{name}: stride", stride, dims), sizes(f"{name}: dilation", dilation, dims)
        settings = {"stride": self.steps, "dilation": self.spread, "groups": group, "bias": has_bias}
        self.make(in_channels, out_channels, self.window, dtype=dtype, **settings)
        self.pad_mode, self.group, self.has_bias = pad_mode, group, has_bias
        self.fill("weight_init", self.weight, weight_init)
        self.fill("bias_init", self.bias, bias_init)

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
    """A transposed convolution; "same" gives stride times as many outputs as inputs.

    Args:
        output_padding: zeros after the end of each dimension, as in MindSpore (torch computes them); for pad_mode
            "pad".
    """

    def __init__(self, *args: Any, output_padding: Size = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beyond = sizes(f"{type(self).__name__}: output_padding", output_padding, self.dims)
        if any(self.beyond) and self.pad_mode != "pad":
            raise MindSporeValueError(
                f"{type(self).__name__}: output_padding={output_padding!r} beside pad_mode={self.pad_mode!r}; use "
                "pad_mode='pad'"
            )

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
                begin = self.around[2 * i]
                length = whole - begin - self.around[2 * i + 1]
            full = cut(full, axis, begin, length)
        full = full if self.bias is None else full + self.bias.reshape(-1, *[1] * self.dims)
        return F.pad(full, [n for beyond in self.beyond[::-1] for n in (0, beyond)]) if any(self.beyond) else full


class Conv1dTranspose(_Transposed, nn.ConvTranspose1d):
    """Transposed one-dimensional convolution."""

    kind, function, dims = nn.ConvTranspose1d, staticmethod(F.conv_transpose1d), 1


class Conv2dTranspose(_Transposed, nn.ConvTranspose2d):
    """Transposed two-dimensional convolution; `output_padding` comes before `dilation`."""

    kind, function, dims = nn.ConvTranspose2d, staticmethod(F.conv_transpose2d), 2

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, output_padding: Size = 0, dilation: Size = 1, group: int = 1, has_bias: bool = False,
        weight_init: Any = None, bias_init: Any = None, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, has_bias, weight_init,
            bias_init, output_padding=output_padding, dtype=dtype,
        )  # fmt: skip


class Conv3dTranspose(_Transposed, nn.ConvTranspose3d):
    """Transposed three-dimensional convolution; `output_padding` comes after `group`."""

    kind, function, dims = nn.ConvTranspose3d, staticmethod(F.conv_transpose3d), 3

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, pad_mode: str = "same",
        padding: Size = 0, dilation: Size = 1, group: int = 1, output_padding: Size = 0, has_bias: bool = False,
        weight_init: Any = None, bias_init: Any = None, data_format: str = "NCDHW", dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, pad_mode, padding, dilation, group, has_bias, weight_init,
            bias_init, data_format, output_padding=output_padding, dtype=dtype,
        )  # fmt: skip


class _Pool(Cell):
    """A window of two dimensions. The stride is 1 unless given, as in MindSpore and not as in torch."""

    def _settle(self, kernel_size: Any, stride: Any, pad_mode: str, padding: Any, data_format: str) -> None:
        name = type(self).__name__
        check_only(name, "data_format", data_format, LAYOUTS[2], LAYOUT_REMEDY)
        self.window = sizes(f"{name}: kernel_size", kernel_size, 2)
        self.steps = sizes(f"{name}: stride", stride, 2)
        self.pad_mode = str(pad_mode).lower()
        self.around = check_padding(name, self.pad_mode, padding, 2)
        if self.pad_mode == "pad" and self.around[0::2] != self.around[1::2]:
            raise MindSporeValueError(f"{name}: padding={padding!r}; expected the same before and after")
        self.both = self.around[0::2]

    def extra_repr(self) -> str:
        """Show the settings, not MindSpore's defaults: stride is 1 unless given."""
        return f"kernel_size={self.window}, stride={self.steps}, pad_mode={self.pad_mode!r}"


class MaxPool2d(_Pool):
    """Maximum of each window.

    Args:
        kernel_size, stride: one number or two; the stride is 1 unless given.
        pad_mode: "same", "valid" or "pad".
        padding: one number or two, for "pad"; what is added never is the maximum.
        dilation, return_indices, ceil_mode: as torch's, for "pad".
        data_format: "NCHW".
    """

    def __init__(
        self, kernel_size: int | Sequence[int] = 1, stride: int | Sequence[int] = 1, pad_mode: str = "valid",
        padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, return_indices: bool = False,
        ceil_mode: bool = False, data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        super().__init__()
        self._settle(kernel_size, stride, pad_mode, padding, data_format)
        self.spread = sizes("MaxPool2d: dilation", dilation, 2)
        self.return_indices, self.ceil_mode = return_indices, ceil_mode
        if self.pad_mode != "pad" and (self.spread != (1, 1) or return_indices or ceil_mode):
            raise MindSporeValueError(
                f"MaxPool2d: dilation, return_indices and ceil_mode belong to pad_mode='pad', not {pad_mode!r}"
            )

    def construct(self, x: Tensor) -> Any:
        """Return the pooled `x`, and with `return_indices` the places."""
        if self.pad_mode == "pad":
            pool: Any = F.max_pool2d  # its overloads are by the value of return_indices
            return pool(x, self.window, self.steps, self.both, self.spread, self.ceil_mode, self.return_indices)
        x = pad_for(x, self.pad_mode, self.around, self.window, self.steps, (1, 1), float("-inf"))
        return F.max_pool2d(x, self.window, self.steps)


class AvgPool2d(_Pool):
    """Mean of each window.

    Args:
        kernel_size, stride: one number or two; the stride is 1 unless given.
        pad_mode: "same" (means of what is inside the image), "valid" or "pad".
        padding: one number or two, for "pad".
        ceil_mode, count_include_pad, divisor_override: as torch's, for "pad": padding counts unless told otherwise.
        data_format: "NCHW".
    """

    def __init__(
        self, kernel_size: int | Sequence[int] = 1, stride: int | Sequence[int] = 1, pad_mode: str = "valid",
        padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
        divisor_override: int | None = None, data_format: str = "NCHW",
    ) -> None:  # fmt: skip
        super().__init__()
        self._settle(kernel_size, stride, pad_mode, padding, data_format)
        self.ceil_mode, self.count_include_pad, self.divisor_override = ceil_mode, count_include_pad, divisor_override
        if self.pad_mode != "pad" and (ceil_mode or not count_include_pad or divisor_override is not None):
            raise MindSporeValueError(
                "AvgPool2d: ceil_mode, count_include_pad and divisor_override belong to pad_mode='pad', not "
                f"{pad_mode!r}"
            )

    def construct(self, x: Tensor) -> Tensor:
        """Return the pooled `x`."""
        if self.pad_mode == "pad":
            return F.avg_pool2d(
                x, self.window, self.steps, self.both, self.ceil_mode, self.count_include_pad, self.divisor_override
            )  # fmt: skip
        padded = pad_for(x, self.pad_mode, self.around, self.window, self.steps, (1, 1))
        if padded is x:
            return F.avg_pool2d(x, self.window, self.steps)
        inside = pad_for(torch.ones_like(x), self.pad_mode, self.around, self.window, self.steps, (1, 1))
        return F.avg_pool2d(padded, self.window, self.steps) / F.avg_pool2d(inside, self.window, self.steps)
