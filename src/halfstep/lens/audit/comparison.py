"""Comparison: how far tensors are from what they should be; masks are left out."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import Format, float64_of
from halfstep.kernels.reference.exponents import LARGEST, merge_
from halfstep.lens.sketch import Sketches

__all__ = ["HUGE", "ErrorSums", "Hidden", "added_masks", "hidden_in", "merged"]

MASKED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENDS = frozenset(torch.finfo(dtype).max for dtype in MASKED_DTYPES)
"""Largest finite numbers: what overflows becomes inf, so a number that is exactly this was written on purpose."""

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
        """Return where `tensor` is a mask, infinities of a masked side included."""
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
        if isinstance(value, Tensor) and value.dtype in MASKED_DTYPES and not value.requires_grad and value.numel() > 1:
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
    if (bits in SUSPECT or bits >= HUGE_BITS) and tensor.dtype in MASKED_DTYPES and tensor.layout is torch.strided:
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


@dataclass(slots=True)
class ErrorSums:
    """How far tensors are from what they should be: sums over elements, added up over calls.

    Attributes:
        difference: sum of squared differences, where both are finite.
        reference: sum of squares of what should be there.
        worst: largest relative error of one call.
        count: elements compared.
        flushed: elements that are zero and should not be: too small for the format.
        lost: elements that are not finite, or at the format's limit, and should be finite and within it.
    """

    difference: float = 0.0
    reference: float = 0.0
    worst: float = 0.0
    count: int = 0
    flushed: int = 0
    lost: int = 0

    @torch.no_grad()
    def add(
        self, actual: Tensor, wanted: Tensor, form: Format, scale: float = 1.0, *, hidden: Hidden | None = None
    ) -> float:
        """Compare `actual`, numbers of `form` that carry a factor `scale`, with `wanted`, which carries none.

        Numbers that are `hidden`, masks, do not count.

        Returns:
            The relative error of this one.
        """
        wide = torch.float64 if wanted.dtype is torch.float64 else torch.float32
        found, wanted = actual.to(wide), wanted.to(wide)
        if scale != 1.0:
            wanted = wanted * scale
        if hidden is not None:
            seen = ~(hidden.of(found) | hidden.of(wanted))
            found, wanted = found[seen], wanted[seen]
        apart = found - wanted
        difference, reference = _square(apart), _square(wanted)
        if not math.isfinite(difference) or not math.isfinite(reference):
            wanted = torch.where(wanted.abs() > HUGE, math.inf, wanted)
            both = found.isfinite() & wanted.isfinite()
            self.lost += int((~found.isfinite() & wanted.isfinite()).sum())
            apart, wanted = float64_of(apart[both]), torch.where(wanted.isfinite(), wanted, 0.0)
            difference, reference = _square(apart), _square(float64_of(wanted))
        if not form.has_inf:
            self.lost += int(((found.abs() >= form.max) & (wanted.abs() > form.max)).sum())
        if form.is_narrow:
            self.flushed += int(((found == 0) & (wanted != 0) & (wanted.abs() < form.smallest_normal)).sum())
        self.count += found.numel()
        if scale != 1.0:
            difference, reference = difference / scale**2, reference / scale**2
        self.difference += difference
        self.reference += reference
        error = _ratio(difference, reference)
        self.worst = max(self.worst, error)
        return error

    def exact(self, count: int) -> None:
        """Count elements that are what they should be by definition."""
        self.count += count

    @property
    def error(self) -> float:
        """Return the relative error: the norm of all differences over that of what should be there; nan of nothing."""
        return _ratio(self.difference, self.reference) if self.count else math.nan

    def share(self, elements: int) -> float:
        """Return `elements` as a share of those compared."""
        return elements / self.count if self.count else 0.0


def _square(tensor: Tensor) -> float:
    flat = tensor.reshape(-1)
    return float(flat.dot(flat))


def _ratio(difference: float, reference: float) -> float:
    if reference:
        return math.sqrt(difference / reference)
    return math.inf if difference else 0.0
