"""What a gradient is: multiplied by the scale, or divided by it again. Told by a mark on the gradient itself.

A mark lives as long as the gradient: adding to it keeps the mark, `clear_grad` drops both.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["SCALED", "UNSCALED", "mark", "marked"]

SCALED, UNSCALED = "scaled", "unscaled"
_ATTRIBUTE = "_halfstep_gradient"


def mark(gradient: Tensor | None, what: str) -> None:
    """Say that `gradient` is `SCALED` or `UNSCALED`."""
    if gradient is not None:
        setattr(gradient, _ATTRIBUTE, what)


def marked(gradient: Tensor | None, what: str) -> bool:
    """Return whether `gradient` is known to be `what`."""
    return getattr(gradient, _ATTRIBUTE, None) == what
