"""megengine.functional.tensor: making and arranging tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.compat.megengine.device import device_of
from halfstep.compat.megengine.tensor import dtype_of

__all__ = [
    "arange", "broadcast_to", "concat", "copy", "expand_dims", "eye", "flatten", "full", "full_like", "gather",
    "linspace", "ones", "ones_like", "repeat", "reshape", "roll", "split", "squeeze", "stack", "swapaxes", "tile",
    "transpose", "where", "zeros", "zeros_like",
]  # fmt: skip

Shape = int | Sequence[int]


def _shape(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def full(shape: Shape, value: Any, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return a tensor filled with `value`."""
    return torch.full(_shape(shape), value, dtype=dtype_of(dtype), device=device_of(device))


def zeros(shape: Shape, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return zeros."""
    return full(shape, 0, dtype, device)


def ones(shape: Shape, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return ones."""
    return full(shape, 1, dtype, device)


def full_like(inp: Tensor, value: Any) -> Tensor:
    """Return a tensor like `inp` filled with `value`."""
    return torch.full_like(inp, value)


def zeros_like(inp: Tensor) -> Tensor:
    """Return zeros like `inp`."""
    return torch.zeros_like(inp)


def ones_like(inp: Tensor) -> Tensor:
    """Return ones like `inp`."""
    return torch.ones_like(inp)


def eye(N: int, M: int | None = None, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return an identity matrix."""
    return torch.eye(N, N if M is None else M, dtype=dtype_of(dtype), device=device_of(device))


def arange(
    start: float = 0, stop: float | None = None, step: float = 1, dtype: Any = "float32", device: str | None = None
) -> Tensor:
    """Return numbers from `start` (0 if there is no `stop`) up to and without `stop`."""
    first, last = (0, start) if stop is None else (start, stop)
    return torch.arange(first, last, step, dtype=dtype_of(dtype), device=device_of(device))


def linspace(start: float, stop: float, num: int, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return `num` numbers from `start` to `stop`."""
    return torch.linspace(start, stop, num, dtype=dtype_of(dtype), device=device_of(device))


def concat(inps: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join along an axis that there is."""
    return torch.cat(list(inps), axis)


def stack(inps: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join along a new axis."""
    return torch.stack(list(inps), axis)


def split(inp: Tensor, nsplits_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Split into so many parts, or at so many places."""
    return list(torch.tensor_split(inp, nsplits_or_sections, axis))


def reshape(inp: Tensor, target_shape: Sequence[int]) -> Tensor:
    """Return the elements in another shape."""
    return inp.reshape(tuple(target_shape))


def flatten(inp: Tensor, start_axis: int = 0, end_axis: int = -1) -> Tensor:
    """Join the axes from `start_axis` to `end_axis` into one."""
    return torch.flatten(inp, start_axis, end_axis)


def transpose(inp: Tensor, pattern: Sequence[int]) -> Tensor:
    """Return the axes in another order."""
    return inp.permute(tuple(pattern))


def swapaxes(inp: Tensor, axis1: int, axis2: int) -> Tensor:
    """Swap two axes."""
    return torch.swapaxes(inp, axis1, axis2)


def expand_dims(inp: Tensor, axis: int) -> Tensor:
    """Add an axis of length 1."""
    return inp.unsqueeze(axis)


def squeeze(inp: Tensor, axis: int | None = None) -> Tensor:
    """Remove axes of length 1."""
    return inp.squeeze() if axis is None else inp.squeeze(axis)


def broadcast_to(inp: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat along axes of length 1 up to `shape`."""
    return torch.broadcast_to(inp, tuple(shape))


def repeat(inp: Tensor, repeats: int, axis: int | None = None) -> Tensor:
    """Repeat each element."""
    return torch.repeat_interleave(inp, repeats, axis)


def tile(inp: Tensor, reps: Sequence[int]) -> Tensor:
    """Repeat the whole."""
    return torch.tile(inp, tuple(reps))


def roll(inp: Tensor, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """Shift elements around."""
    return torch.roll(inp, shift, axis)  # type: ignore[arg-type]


def gather(inp: Tensor, axis: int, index: Tensor) -> Tensor:
    """Pick elements along an axis."""
    return torch.gather(inp, axis, index.long())


def where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return `x` where `mask`, else `y`."""
    return torch.where(mask, x, y)


def copy(inp: Tensor, device: str | None = None) -> Tensor:
    """Return a copy, on another device if one is named."""
    return inp.clone() if device is None else inp.to(device_of(device), copy=True)
