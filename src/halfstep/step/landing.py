"""The address of `Landing` for programs outside."""

from halfstep.accelerators import Landing

__all__ = ["Landing"]
