"""Masks: constants at the end of a format that code writes to hide a place. They are no data, and nobody reads them.

``torch.finfo(dtype).min`` is what libraries fill masks with, of fp32 as a rule. In a sum with a mask its numbers are
swallowed, or stay within a rounding or two of it; so all of the last two binades on its side belongs to the mask.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.reference.exponents import LARGEST, merge_
from halfstep.lens.sketch import Sketches

__all__ = ["HUGE", "Hidden", "added_masks", "hidden_in", "merged"]

FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENDS = frozenset(torch.finfo(dtype).max for dtype in FORMATS)
"""Largest finite numbers: what overflows becomes inf, so a number that is exactly this was written by somebody."""

HUGE = 1e30
"""From here on a constant is a mask also where it is not the end of a format."""

SUSPECT = frozenset(struct.unpack("<q", struct.pack("<d", end))[0] for end in ENDS)
HUGE_BITS: int = struct.unpack("<q", struct.pack("<d", HUGE))[0]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Which numbers of a tensor are masks: those up to `low`, and those from `high` on."""

    low: float = -math.inf
    high: float = math.inf

    def of(self, tensor: Tensor) -> Tensor:
        """Return where `tensor` is a mask; infinities of a masked side are."""
        found = torch.zeros_like(tensor, dtype=torch.bool)
        if self.low > -math.inf:
            found |= tensor <= self.low
        if self.high < math.inf:
            found |= tensor >= self.high
        return found

    def __or__(self, other: Hidden | None) -> Hidden:
        """Return what hides the masks of both."""
        return self if other is None else Hidden(max(self.low, other.low), min(self.high, other.high))


def hidden_in(tensor: Tensor, largest: float) -> Hidden | None:
    """Return which numbers of `tensor` are masks, None if there are none.

    Args:
        tensor: real, floating.
        largest: its largest finite magnitude.
    """
    if largest not in ENDS and largest < HUGE:
        return None
    ends = [side * largest if _is_mask(tensor * side, largest) else side * math.inf for side in (-1, 1)]
    found = Hidden(ends[0] / 2, ends[1] / 2)
    return None if found == Hidden() else found


def _is_mask(tensor: Tensor, largest: float) -> bool:
    if largest in ENDS:
        return bool((tensor == largest).any())
    near = tensor[(tensor >= largest / 2) & tensor.isfinite()]
    return near.numel() > 1 and bool((near == largest).all())


def added_masks(values: Any) -> Hidden | None:
    """Return the masks among the terms of a sum: constants, which need no gradient. None if there are none."""
    found: Hidden | None = None
    for value in values:
        if isinstance(value, Tensor) and value.dtype in FORMATS and not value.requires_grad and value.numel() > 1:
            ends = [float(end) for end in value.detach().aminmax()]
            largest = max((abs(end) for end in ends if math.isfinite(end)), default=0.0)
            more = hidden_in(value.detach(), largest)
            found = more if found is None else found | more
    return found


def merged(sketch: Sketches | None, tensor: Tensor) -> tuple[Sketches, Hidden | None, int]:
    """Return `sketch`, made if there is none, with `tensor` added but for its masks; these; and how many they are."""
    tensor = tensor.detach()
    made, hidden, count = _sketch(tensor), None, 0
    bits = int(made.rows[0, LARGEST])
    if (bits in SUSPECT or bits >= HUGE_BITS) and tensor.dtype in FORMATS and tensor.layout is torch.strided:
        hidden = hidden_in(tensor, struct.unpack("<d", struct.pack("<q", bits))[0])
        if hidden is not None:
            seen = tensor[~hidden.of(tensor)]
            made, count = _sketch(seen), tensor.numel() - seen.numel()
    if sketch is None:
        return made, hidden, count
    merge_(sketch.rows, made.rows)
    return sketch, hidden, count


def _sketch(tensor: Tensor) -> Sketches:
    made = Sketches(1, tensor.device)
    made.add_([tensor])
    return made
