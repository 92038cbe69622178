"""Comparison: how far tensors are from what they should be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.formats import FP32, Format
from halfstep.lens.audit.masks import HUGE, Hidden

__all__ = ["Comparison"]


@dataclass(slots=True)
class Comparison:
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
            apart, wanted = apart[both].double(), torch.where(wanted.isfinite(), wanted, 0.0)
            difference, reference = _square(apart), _square(wanted.double())
        if not form.has_inf:
            self.lost += int(((found.abs() >= form.max) & (wanted.abs() > form.max)).sum())
        if form.exponent_bits < FP32.exponent_bits:
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
