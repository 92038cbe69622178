"""Errors: what was expected, the value got, where, and the remedy.

Every error of halfstep derives from `HalfstepError` and also from the built-in class a caller of the corresponding
torch function would catch, so ``except ValueError`` and ``except RuntimeError`` keep working.
"""

import difflib
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from sys import _getframe

__all__ = [
    "AuditError", "BannedOperatorError", "BatchError", "BindError", "CheckpointError", "ConversionError", "FormatError",
    "HalfstepError", "IntegrationError", "LintError", "LossError", "MissingKernelError", "PolicyError", "RegionError",
    "ScaleError", "SettingError", "StepError", "TaskError", "UnbuiltError", "WeightsError", "did_you_mean",
]  # fmt: skip

TORCH = str(Path(getattr(find_spec("torch"), "origin", "")).parent) + os.sep
HERE = str(Path(__file__).parent) + os.sep
FOLDERS = (
    *("advise", "auto", "binding", "cast", "checkpoints", "compat", "kernels", "lens", "policy", "scale", "step"),
    *("update", "weights"),
)
FILES = ("arguments.py", "errors.py", "events.py", "schema.py", "trees.py")
OURS = (TORCH, "<frozen", *(HERE + part for part in (*FOLDERS, *FILES)))
"""Where files begin whose lines no message names: those of torch and of halfstep."""


OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # in the plain RuntimeErrors that torch raises besides


def lacks_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out: programs that search for a batch size wait for it unchanged."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


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


class PolicyError(HalfstepError, ValueError, RuntimeError):
    """A policy, rule, preset, operator or module pattern that makes no sense, or a device that torch does not know.

    torch.autocast raises a RuntimeError for a device that does not exist and a ValueError for one that is no string.
    """


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


class TaskError(HalfstepError, ValueError):
    """A task that does not exist, cannot be loaded or makes no sense."""


class ScaleError(HalfstepError, RuntimeError):
    """A gradient scaler used out of order, or a scale rule with impossible parameters."""


class WeightsError(HalfstepError, RuntimeError):
    """Precise weights and low weights that cannot be kept together."""


class StepError(HalfstepError, RuntimeError):
    """A training step that cannot be carried out as asked."""


class SettingError(StepError, AttributeError):
    """A setting that is fixed when its object is built was assigned."""


class BatchError(StepError, IndexError):
    """A batch with labels, targets or indices that an operator does not take."""


class CheckpointError(StepError):
    """A checkpoint that cannot be written, is damaged, or is no checkpoint of this training step."""


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the option nearest to `word`, or ``""`` if none is near or it is no text.

    Examples:
        >>> hs.errors.did_you_mean("mixd", ["mixed", "O2"])
        "; did you mean 'mixed'?"
    """
    if not isinstance(word, str):
        return ""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def few(names: Sequence[str], most: int) -> str:
    """Return the first of several names, and how many there are besides: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, "" if it has none."""
    return (str(error).strip().splitlines() or [""])[0]


@cache
def ours(filename: str) -> bool:
    """Return whether a file belongs to torch or to halfstep."""
    return filename.startswith(OURS)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line that led here; in a thread that runs a method of ours, at its lowest line."""
    frame = _getframe(1)
    while ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)
