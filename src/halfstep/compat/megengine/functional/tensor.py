"""megengine.functional.tensor: making and arranging tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.compat.megengine.tensor import device_of, dtype_of, tensor
from halfstep.errors import StepError

__all__ = [
    "arange", "broadcast_to", "concat", "copy", "expand_dims", "eye", "flatten", "full", "full_like", "gather",
    "linspace", "ones", "ones_like", "repeat", "reshape", "roll", "split", "squeeze", "stack", "swapaxes", "tile",
    "transpose", "where", "zeros", "zeros_like",
]  # fmt: skip

Shape = int | Sequence[int]


def _shape(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def full(shape: Shape, value: Any, dtype: Any = None, device: str | None = None) -> Tensor:
    """Return a tensor filled with `value`; by default int32, fp32 or bool, as `value` is."""
    if dtype is None:
        made = tensor(value, device=device)
        return made.expand(_shape(shape)).contiguous()
    return torch.full(_shape(shape), value, dtype=dtype_of(dtype), device=device_of(device))


def zeros(shape: Shape, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return zeros."""
    return torch.zeros(_shape(shape), dtype=dtype_of(dtype), device=device_of(device))


def ones(shape: Shape, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return ones."""
    return torch.ones(_shape(shape), dtype=dtype_of(dtype), device=device_of(device))


def full_like(inp: Tensor, value: Any) -> Tensor:
    """Return a tensor like `inp` filled with `value`."""
    return torch.full_like(inp, value)


def zeros_like(inp: Tensor) -> Tensor:
    """Return zeros like `inp`."""
    return torch.zeros_like(inp)


def ones_like(inp: Tensor) -> Tensor:
    """Return ones like `inp`."""
    return torch.ones_like(inp)


def eye(N: Shape, M: int | None = None, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return an identity matrix of `N` rows and `M` (by default `N`) columns; `N` may be both."""
    rows, columns = (N, N if M is None else M) if isinstance(N, int) else (N[0], N[1])
    return torch.eye(rows, columns, dtype=dtype_of(dtype), device=device_of(device))


def arange(
    start: float = 0, stop: float | None = None, step: float = 1, dtype: Any = "float32", device: str | None = None
) -> Tensor:
    """Return numbers from `start` (0 if there is no `stop`) up to and without `stop`."""
    first, last = (0, start) if stop is None else (start, stop)
    return torch.arange(first, last, step, dtype=dtype_of(dtype), device=device_of(device))


def linspace(start: float, stop: float, num: int, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return `num` numbers from `start` to `stop`."""
    return torch.linspace(start, stop, num, dtype=dtype_of(dtype), device=device_of(device))


def concat(inps: Sequence[Tensor], axis: int = 0, device: str | None = None) -> Tensor:
    """Join along an axis that there is."""
    return torch.cat(_placed(inps, device), axis)


def stack(inps: Sequence[Tensor], axis: int = 0, device: str | None = None) -> Tensor:
    """Join along a new axis."""
    return torch.stack(_placed(inps, device), axis)


def _placed(inps: Sequence[Tensor], device: str | None) -> list[Tensor]:
    return list(inps) if device is None else [one.to(device_of(device)) for one in inps]


def split(inp: Tensor, nsplits_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Split into so many equal parts, or at so many places."""
    if isinstance(nsplits_or_sections, int):
        if nsplits_or_sections < 1 or inp.shape[axis] % nsplits_or_sections:
            raise StepError(
                f"split: axis {axis} has {inp.shape[axis]} elements, which are not {nsplits_or_sections} equal parts; "
                "pass the places to split at"
            )
        return list(torch.tensor_split(inp, nsplits_or_sections, axis))
    return list(torch.tensor_split(inp, tuple(nsplits_or_sections), axis))


def reshape(inp: Tensor, target_shape: Shape) -> Tensor:
    """Return the elements in another shape."""
    return inp.reshape(_shape(target_shape))


def flatten(inp: Tensor, start_axis: int = 0, end_axis: int = -1) -> Tensor:
    """Join the axes from `start_axis` to `end_axis` into one."""
    return torch.flatten(inp, start_axis, end_axis)


def transpose(inp: Tensor, pattern: Sequence[int | str]) -> Tensor:
    """Return the axes in another order; "x" in the pattern is a new axis of length 1."""
    result = inp.permute([axis for axis in pattern if isinstance(axis, int)])
    for place, axis in enumerate(pattern):
        if axis == "x":
            result = result.unsqueeze(place)
        elif not isinstance(axis, int):
            raise StepError(f"transpose: {axis!r} in the pattern; expected numbers of axes, or 'x' for a new one")
    return result


def swapaxes(inp: Tensor, axis1: int, axis2: int) -> Tensor:
    """Swap two axes."""
    return torch.swapaxes(inp, axis1, axis2)


def expand_dims(inp: Tensor, axis: Shape) -> Tensor:
    """Add an axis of length 1, or several: `axis` counts in the result."""
    places = (axis,) if isinstance(axis, int) else tuple(axis)
    for place in sorted(one % (inp.dim() + len(places)) for one in places):
        inp = inp.unsqueeze(place)
    return inp


def squeeze(inp: Tensor, axis: Shape | None = None) -> Tensor:
    """Remove axes of length 1: all, one or several."""
    if axis is None:
        return inp.squeeze()
    places = (axis,) if isinstance(axis, int) else tuple(axis)
    for place in places:
        if inp.shape[place] != 1:
            raise StepError(
                f"squeeze: axis {place} has {inp.shape[place]} elements; only an axis of length 1 goes away"
            )
    return inp.squeeze(places)


def broadcast_to(inp: Tensor, shape: Shape) -> Tensor:
    """Repeat along axes of length 1 up to `shape`."""
    return torch.broadcast_to(inp, _shape(shape))


def repeat(inp: Tensor, repeats: int, axis: int | None = None) -> Tensor:
    """Repeat each element."""
    return torch.repeat_interleave(inp, repeats, axis)


def tile(inp: Tensor, reps: Sequence[int]) -> Tensor:
    """Repeat the whole."""
    return torch.tile(inp, tuple(reps))


def roll(inp: Tensor, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """Shift elements around."""
    return torch.roll(inp, _several(shift), _several(axis))


def _several(numbers: Any) -> Any:
    return numbers if numbers is None or isinstance(numbers, int) else tuple(numbers)


def gather(inp: Tensor, axis: int, index: Tensor) -> Tensor:
    """Pick elements along an axis."""
    return torch.gather(inp, axis, index.long())


def where(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return `x` where `mask`, else `y`."""
    return torch.where(mask, x, y)


def copy(inp: Tensor, device: str | None = None) -> Tensor:
    """Return a copy, on another device if one is named."""
    return inp.clone() if device is None else inp.to(device_of(device), copy=True)
