"""Errors of this skin: halfstep's, and also the built-in class that MindSpore raises at the same place."""

from __future__ import annotations

from halfstep.errors import HalfstepError

__all__ = ["MindSporeRuntimeError", "MindSporeTypeError", "MindSporeValueError"]


class MindSporeTypeError(HalfstepError, TypeError):
    """An argument of a type that the function does not take."""


class MindSporeValueError(HalfstepError, ValueError):
    """An argument of the right type with an impossible value."""


class MindSporeRuntimeError(HalfstepError, RuntimeError):
    """A training that cannot go on, or cells put together in a way that cannot be carried out."""
