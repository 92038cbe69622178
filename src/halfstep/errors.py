"""Errors: what was expected, the value got, where, and the remedy.

Every error of halfstep derives from `HalfstepError` and also from the built-in class a caller of the corresponding
torch function would catch, so ``except ValueError`` and ``except RuntimeError`` keep working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AuditError",
    "BannedOperatorError",
    "BatchError",
    "BindError",
    "CheckpointError",
    "ConversionError",
    "FormatError",
    "HalfstepError",
    "IntegrationError",
    "LintError",
    "LossError",
    "MissingKernelError",
    "PolicyError",
    "RegionError",
    "ScaleError",
    "StepError",
    "UnbuiltError",
    "WeightsError",
    "did_you_mean",
]


class HalfstepError(Exception):
    """Base class of all halfstep errors.

    Examples:
        >>> try:
        ...     hs.Policy.of("mixd")
        ... except hs.HalfstepError as error:  # a PolicyError, which is a ValueError too
        ...     print(error)
        unknown preset 'mixd'; expected one of O0, ..., or a path ending in .toml; did you mean 'mixed'?
    """


class IntegrationError(HalfstepError, ImportError):
    """A library that an integration needs is absent or too old, or its object cannot be served."""


class FormatError(HalfstepError, ValueError):
    """A number format that does not exist, or a value a format cannot describe."""


class PolicyError(HalfstepError, ValueError):
    """A policy, rule, preset, operator or module pattern that makes no sense."""


class UnbuiltError(HalfstepError, NotImplementedError):
    """Something that this version of halfstep, or a class made to be derived from, does not do."""


class BindError(HalfstepError, RuntimeError):
    """A model or optimizer that a policy cannot be bound to (or unbound from)."""


class RegionError(HalfstepError, RuntimeError):
    """A region entered, left or nested in a way that cannot be carried out."""


class BannedOperatorError(RegionError, NotImplementedError):
    """An operator the policy forbids was called with low-precision inputs (Apex raises NotImplementedError there)."""


class MissingKernelError(RegionError, NotImplementedError):
    """An operator that torch does not have in the low format of a region."""


class ConversionError(RegionError, TypeError):
    """A low tensor handed to a library that does not have its format."""


class LossError(HalfstepError, RuntimeError):
    """A loss called with tensors or settings that do not belong together."""


class AuditError(HalfstepError, ValueError):
    """An audit that cannot be made of these arguments, or a question about it that makes no sense."""


class LintError(HalfstepError, ValueError):
    """A target that the linter cannot check, or a rule that does not exist."""


class ScaleError(HalfstepError, RuntimeError):
    """A gradient scaler used out of order, or a scale rule with impossible parameters."""


class WeightsError(HalfstepError, RuntimeError):
    """Precise weights and low weights that cannot be kept together."""


class StepError(HalfstepError, RuntimeError):
    """A training step that cannot be carried out as asked."""


class BatchError(StepError, IndexError):
    """A batch with labels, targets or indices that an operator does not take."""


class CheckpointError(StepError):
    """A checkpoint that cannot be written, is damaged, or is no checkpoint of this training step."""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the option nearest to `word`, or ``""`` if none is near.

    Examples:
        >>> hs.errors.did_you_mean("mixd", ["mixed", "O2"])
        "; did you mean 'mixed'?"
    """
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
