"""Padding as MindSpore means it ("same", "valid" and "pad"), and convolutions with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError

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


def check_padding(where: str, pad_mode: str, padding: Size, dims: int) -> tuple[int, ...]:
    """Return the padding as (begin, end) of each dimension, first dimension first."""
    if pad_mode not in PAD_MODES:
        raise MindSporeValueError(f"{where}: pad_mode={pad_mode!r}; expected one of {', '.join(map(repr, PAD_MODES))}")
    each = (padding,) * (2 * dims) if isinstance(padding, int) else tuple(padding)
    if len(each) == dims and dims > 1:
        each = tuple(n for n in each for _ in range(2))
    if len(each) != 2 * dims or any(n < 0 for n in each):
        raise MindSporeValueError(f"{where}: padding={padding!r}; expected a number from 0, or {2 * dims} of them")
    if pad_mode != "pad" and any(each):
        raise MindSporeValueError(
            f"{where}: padding={padding!r} beside pad_mode={pad_mode!r}, which says the padding; use pad_mode='pad'"
        )
    return each


def _same_padding(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Return the padding that gives ceil(size / stride) outputs, as `check_padding`; an odd rest goes to the end."""
    amounts = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        amounts += [total // 2, total - total // 2]
    return amounts


def pad_for(
    x: Tensor, pad_mode: str, padding: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], value: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return `x` padded so that an unpadded convolution or pooling of it is the one that is meant."""
    if pad_mode == "same":
        padding = _same_padding(x.shape[-len(kernel) :], kernel, stride, dilation)
    elif not any(padding):
        return x
    pairs = [padding[i : i + 2] for i in range(0, len(padding), 2)][::-1]  # torch counts from the last dimension
    return F.pad(x, [n for pair in pairs for n in pair], value=value)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, pad_mode: str, padding: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """Return the convolution, with as many dimensions as `stride` has numbers."""
    x = pad_for(x, pad_mode, padding, weight.shape[2:], stride, dilation)
    return CONVOLUTIONS[len(stride) - 1](x, weight, bias, stride, 0, dilation, groups)


def transposed(
    x: Tensor, weight: Tensor, pad_mode: str, padding: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
    groups: int, size: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of a convolution with respect to its input: all of it, of which the padding is cut off.

    `size` is that input's in space; by default "same" gives stride times as many outputs as inputs, and the other modes
    the largest that the padding allows. A stride longer than the window leaves zeros at the end.
    """
    kernel = weight.shape[2:]
    if size is None and pad_mode == "same":
        size = [n * s for n, s in zip(x.shape[2:], stride, strict=True)]
    elif size is None:
        whole = zip(x.shape[2:], kernel, stride, dilation, padding[::2], padding[1::2], strict=True)
        size = [(n - 1) * s + (k - 1) * d + 1 - begin - end for n, k, s, d, begin, end in whole]
    if pad_mode == "same":
        padding = _same_padding(size, kernel, stride, dilation)
    full = TRANSPOSED[len(stride) - 1](x, weight, None, stride, 0, 0, groups, dilation)
    for axis, (begin, length) in enumerate(zip(padding[::2], size, strict=True), -len(size)):
        there = min(length, full.shape[axis] - begin)
        full = full.narrow(axis, begin, there)
        if there < length:
            full = F.pad(full, [0, 0] * (-axis - 1) + [0, length - there])
    return full
