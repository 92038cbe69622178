"""torch.cuda.amp.common."""

from __future__ import annotations

__all__ = ["amp_definitely_not_available"]


def amp_definitely_not_available() -> bool:
    """Return False: mixed precision works on every machine, if need be emulated."""
    return False
