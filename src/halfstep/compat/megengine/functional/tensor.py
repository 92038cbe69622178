"""megengine.functional.tensor: making and arranging tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.compat.megengine.tensor import device_of, dtype_of, tensor
from halfstep.compat.shared import public
from halfstep.errors import StepError

__all__ = [
    "arange", "broadcast_to", "concat", "copy", "expand_dims", "eye", "flatten", "full", "full_like", "gather",
    "linspace", "ones", "ones_like", "repeat", "reshape", "roll", "split", "squeeze", "stack", "swapaxes", "tile",
    "transpose", "where", "zeros", "zeros_like",
]  # fmt: skip

Shape = int | Sequence[int]


def _several(numbers: Any) -> Any:
    return numbers if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _made(dtype: Any, device: str | None) -> Any:
    return {"dtype": dtype_of(dtype), "device": device_of(device)}


def full(shape: Shape, value: Any, dtype: Any = None, device: str | None = None) -> Tensor:
    """Return a tensor filled with `value`; by default int32, fp32 or bool, as `value` is."""
    if dtype is None:
        return tensor(value, device=device).expand(_several(shape)).contiguous()
    return torch.full(_several(shape), value, **_made(dtype, device))


zeros = public(torch.zeros, lambda shape, dtype="float32", device=None: full(shape, 0, dtype, device))
ones = public(torch.ones, lambda shape, dtype="float32", device=None: full(shape, 1, dtype, device))
linspace = public(
    torch.linspace,
    lambda start, stop, num, dtype="float32", device=None: torch.linspace(start, stop, num, **_made(dtype, device)),
)
full_like = public(torch.full_like, lambda inp, value: torch.full_like(inp, value))
zeros_like = public(torch.zeros_like, lambda inp: torch.zeros_like(inp))
ones_like = public(torch.ones_like, lambda inp: torch.ones_like(inp))


def eye(N: Shape, M: int | None = None, dtype: Any = "float32", device: str | None = None) -> Tensor:
    """Return an identity matrix of `N` rows and `M` (by default `N`) columns; `N` may be both."""
    rows, columns = (N, N if M is None else M) if isinstance(N, int) else (N[0], N[1])
    return torch.eye(rows, columns, **_made(dtype, device))


def arange(
    start: float = 0, stop: float | None = None, step: float = 1, dtype: Any = "float32", device: str | None = None
) -> Tensor:
    """Return numbers from `start` (0 if there is no `stop`) up to and without `stop`."""
    first, last = (0, start) if stop is None else (start, stop)
    return torch.arange(first, last, step, **_made(dtype, device))


concat = public(torch.cat, lambda inps, axis=0, device=None: torch.cat(_placed(inps, device), axis), "concat")
stack = public(torch.stack, lambda inps, axis=0, device=None: torch.stack(_placed(inps, device), axis))


def _placed(inps: Sequence[Tensor], device: str | None) -> list[Tensor]:
    return list(inps) if device is None else [one.to(device_of(device)) for one in inps]


def split(inp: Tensor, nsplits_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Split into so many equal parts, or at so many places."""
    parts = nsplits_or_sections if isinstance(nsplits_or_sections, int) else tuple(nsplits_or_sections)
    if isinstance(parts, int) and (parts < 1 or inp.shape[axis] % parts):
        raise StepError(
            f"split: axis {axis} has {inp.shape[axis]} elements, which are not {parts} equal parts; pass the places to "
            "split at"
        )
    return list(torch.tensor_split(inp, parts, axis))


def transpose(inp: Tensor, pattern: Sequence[int | str]) -> Tensor:
    """Return the axes in another order; "x" in the pattern is a new axis of length 1."""
    result = inp.permute([axis for axis in pattern if isinstance(axis, int)])
    for place, axis in enumerate(pattern):
        if axis == "x":
            result = result.unsqueeze(place)
        elif not isinstance(axis, int):
            raise StepError(f"transpose: {axis!r} in the pattern; expected numbers of axes, or 'x' for a new one")
    return result


def expand_dims(inp: Tensor, axis: Shape) -> Tensor:
    """Add an axis of length 1, or several: `axis` counts in the result."""
    places = _several(axis)
    for place in sorted(one % (inp.dim() + len(places)) for one in places):
        inp = inp.unsqueeze(place)
    return inp


def squeeze(inp: Tensor, axis: Shape | None = None) -> Tensor:
    """Remove axes of length 1: all, one or several."""
    if axis is None:
        return inp.squeeze()
    places = _several(axis)
    for place in places:
        if (size := inp.shape[place]) != 1:
            raise StepError(f"squeeze: axis {place} has {size} elements; only an axis of length 1 goes away")
    return inp.squeeze(places)


reshape = public(torch.reshape, lambda inp, target_shape: inp.reshape(_several(target_shape)))
flatten = public(torch.flatten, lambda inp, start_axis=0, end_axis=-1: torch.flatten(inp, start_axis, end_axis))
swapaxes = public(torch.swapaxes, lambda inp, axis1, axis2: torch.swapaxes(inp, axis1, axis2))
broadcast_to = public(torch.broadcast_to, lambda inp, shape: torch.broadcast_to(inp, _several(shape)))
repeat = public(
    torch.repeat_interleave, lambda inp, repeats, axis=None: torch.repeat_interleave(inp, repeats, axis), "repeat"
)
tile = public(torch.tile, lambda inp, reps: torch.tile(inp, tuple(reps)))
roll = public(torch.roll, lambda inp, shift, axis=None: torch.roll(inp, _several(shift), _several(axis)))
gather = public(torch.gather, lambda inp, axis, index: torch.gather(inp, axis, index.long()))
where = public(torch.where, lambda mask, x, y: torch.where(mask, x, y))


def copy(inp: Tensor, device: str | None = None) -> Tensor:
    """Return a copy, on another device if one is named."""
    return inp.clone() if device is None else inp.to(device_of(device), copy=True)
