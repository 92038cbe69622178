"""Marks on gradients: multiplied by the scale, or divided by it again.

A mark lives as long as the gradient: adding to it keeps the mark, `clear_grad` drops both.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["SCALED", "UNSCALED", "Scale", "mark", "marked", "scale_of"]

SCALED, UNSCALED = "scaled", "unscaled"
_ATTRIBUTE, _SCALE = "_halfstep_gradient", "_halfstep_scale"

Scale = tuple[object, Tensor]
"""(what the scaler replaces whenever its scale may move, a copy of the scale)"""


def mark(gradient: Tensor | None, what: str, scale: Scale | None = None) -> None:
    """Mark `gradient` as `SCALED`, by `scale`, or `UNSCALED`."""
    if gradient is not None:
        setattr(gradient, _ATTRIBUTE, what)
        setattr(gradient, _SCALE, scale)


def scale_of(gradient: Tensor | None) -> Scale | None:
    """Return what `gradient` is known to be multiplied by."""
    return getattr(gradient, _SCALE, None)


def marked(gradient: Tensor | None, what: str) -> bool:
    """Return whether `gradient` is known to be `what`."""
    return getattr(gradient, _ATTRIBUTE, None) == what
