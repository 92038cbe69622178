"""MegEngine's GradScaler as its rules state it, in plain Python: what the scaler is compared with.

Written from the rules, not from halfstep: a float that is multiplied, a counter, and a flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Model"]


@dataclass
class Model:
    """One scaler and the tensors it looks after; gradients are lists of numbers, or None."""

    scale_factor: float = 16.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    tracker: int = 0
    found: bool = False

    @property
    def moves(self) -> bool:
        """Zeros stand for a scale that never moves."""
        return self.growth_interval != 0 and self.growth_factor != 0

    def unscale(self, gradients: Sequence[list[float] | None]) -> list[list[float] | None]:
        """Return the gradients divided by the scale, or Nones if a number is not finite."""
        numbers = [number for gradient in gradients if gradient is not None for number in gradient]
        if not all(map(math.isfinite, numbers)):
            self.found = True
            return [None] * len(gradients)
        return [None if g is None else [number / self.scale_factor for number in g] for g in gradients]

    def update(self, new_scale: float | None = None) -> None:
        """Answer the step, or take another scale."""
        if self.moves:
            if new_scale is not None:
                self.scale_factor = new_scale
            elif self.found:
                self.scale_factor *= self.backoff_factor
                self.tracker = 0
            else:
                self.tracker += 1
                if self.tracker >= self.growth_interval:
                    self.scale_factor *= self.growth_factor
                    self.tracker = 0
        self.found = False
