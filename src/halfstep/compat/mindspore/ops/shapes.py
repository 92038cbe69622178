"""Padding as MindSpore means it: "same", "valid" and "pad", for convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError

__all__ = ["PAD_MODES", "check_padding", "cut", "pad_for", "same_padding", "sizes"]

PAD_MODES = ("same", "valid", "pad")


def sizes(name: str, value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return `value` once for each spatial dimension."""
    numbers = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(numbers) != dims or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise MindSporeTypeError(f"{name}={value!r}; expected a whole number or {dims} of them")
    return numbers


def check_padding(where: str, pad_mode: str, padding: int | Sequence[int], dims: int) -> tuple[int, ...]:
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


def same_padding(
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
    if pad_mode == "valid" or (pad_mode == "pad" and not any(padding)):
        return x
    same = pad_mode == "same"
    amounts = same_padding(x.shape[-len(kernel) :], kernel, stride, dilation) if same else list(padding)
    # torch counts from the last dimension
    pairs = [amounts[i : i + 2] for i in range(0, len(amounts), 2)][::-1]
    return F.pad(x, [n for pair in pairs for n in pair], value=value)


def cut(full: Tensor, axis: int, begin: int, length: int) -> Tensor:
    """Return `length` elements of `full` from `begin` along a negative `axis`; beyond its end there are zeros.

    A stride longer than the window leaves outputs at the end that no input reaches.
    """
    there = min(length, full.shape[axis] - begin)
    part = full.narrow(axis, begin, there)
    return part if there == length else F.pad(part, [0, 0] * (-axis - 1) + [0, length - there])
