"""Padding as MindSpore means it ("same", "valid" and "pad"), and convolutions with it."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError, check_value

Size = int | Sequence[int]

PAD_MODES = ("same", "valid", "pad")
CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def sizes(name: str, value: Size, dims: int) -> tuple[int, ...]:
    """Return `value` once for each spatial dimension."""
    numbers = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(numbers) != dims or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise MindSporeTypeError(f"{name}={value!r}; expected a whole number or {dims} of them")
    return numbers


def _check_padding(where: str, pad_mode: str, padding: Size, dims: int) -> tuple[int, ...]:
    """Return the padding as (begin, end) of each dimension, first dimension first."""
    check_value(f"{where}: pad_mode", pad_mode, pad_mode in PAD_MODES, f"one of {', '.join(map(repr, PAD_MODES))}")
    each = (padding,) * (2 * dims) if isinstance(padding, int) else tuple(padding)
    if len(each) == dims and dims > 1:
        each = tuple(n for n in each for _ in range(2))
    fits = len(each) == 2 * dims and all(n >= 0 for n in each)
    check_value(f"{where}: padding", padding, fits, f"a number from 0, or {2 * dims} of them")
    if pad_mode != "pad" and any(each):
        raise MindSporeValueError(
            f"{where}: padding={padding!r} beside pad_mode={pad_mode!r}, which says the padding; use pad_mode='pad'"
        )
    return each


class Windowed:
    """What convolutions and poolings share: the settings of their window, checked, and what is done with them."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pad_mode: str
    pad: tuple[int, ...]  # (begin, end) of each dimension
    group: int

    def set_window(
        self, where: str, dims: int, kernel_size: Size, stride: Size, pad_mode: str, padding: Size,
        dilation: Size = 1, group: int = 1,
    ) -> None:  # fmt: skip
        """Set the window over `dims` dimensions; errors begin with `where`."""
        self.group, self.pad_mode = group, pad_mode
        self.pad = _check_padding(where, pad_mode, padding, dims)
        self.kernel_size = sizes(f"{where}: kernel_size", kernel_size, dims)
        self.stride = sizes(f"{where}: stride", stride, dims)
        self.dilation = sizes(f"{where}: dilation", dilation, dims)

    def _same_padding(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the padding that gives ceil(size / stride) outputs; an odd rest goes to the end."""
        amounts: list[int] = []
        for n, k, s, d in zip(size, self.kernel_size, self.stride, self.dilation, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            amounts += [total // 2, total - total // 2]
        return tuple(amounts)

    def padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Return `x` padded so that an unpadded convolution or pooling of it is the one that is meant."""
        padding = self.pad
        if self.pad_mode == "same":
            padding = self._same_padding(x.shape[-len(self.stride) :])
        elif not any(padding):
            return x
        pairs = [padding[i : i + 2] for i in range(0, len(padding), 2)][::-1]  # torch counts from the last dimension
        return F.pad(x, [n for pair in pairs for n in pair], value=value)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the convolution of `x`, (batch, channels, size of each dimension)."""
        function = CONVOLUTIONS[len(self.stride) - 1]
        return function(self.padded(x), weight, bias, self.stride, 0, self.dilation, self.group)

    def input_gradient(self, x: Tensor, weight: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """Return the gradient of a convolution with respect to its input: all of it, of which the padding is cut off.

        `size` is that input's in space; by default "same" gives stride times as many outputs as inputs, and the other
        modes the largest that the padding allows. A stride longer than the window leaves zeros at the end.
        """
        padding, stride = self.pad, self.stride
        if size is None and self.pad_mode == "same":
            size = [n * s for n, s in zip(x.shape[2:], stride, strict=True)]
        elif size is None:
            whole = zip(x.shape[2:], self.kernel_size, stride, self.dilation, padding[::2], padding[1::2], strict=True)
            size = [(n - 1) * s + (k - 1) * d + 1 - begin - end for n, k, s, d, begin, end in whole]
        if self.pad_mode == "same":
            padding = self._same_padding(size)
        full = TRANSPOSED[len(stride) - 1](x, weight, None, stride, 0, 0, self.group, self.dilation)
        for axis, (begin, length) in enumerate(zip(padding[::2], size, strict=True), -len(size)):
            there = min(length, full.shape[axis] - begin)
            full = full.narrow(axis, begin, there)
            if there < length:
                full = F.pad(full, [0, 0] * (-axis - 1) + [0, length - there])
        return full
