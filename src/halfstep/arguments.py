"""Arguments: what public entries take, refused in one form of words; and attributes that cannot be assigned.

A `Kind` is a set of values with the words that an error uses for it; `|` joins two. bool is no number; numbers of NumPy
are numbers, and a bool of NumPy is a bool.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

from halfstep.errors import HalfstepError, SettingError, did_you_mean

__all__ = [
    "CALLABLE", "COUNT", "DEVICE_TYPE", "FLAG", "FRACTION", "INDEX", "LARGEST", "MODEL", "NONE", "NOT_NEGATIVE",
    "OPTIMIZER", "PATH", "POSITIVE", "TENSOR", "TEXT", "WHOLE", "Kind", "a", "check", "fixed", "listed", "number",
    "one_of", "shown", "whole",
]  # fmt: skip

LARGEST = 2**63 - 1  # that a counter on a device can hold


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that an argument may have."""

    words: str  # what an error says is expected
    has: Callable[[Any], bool]
    options: tuple[str, ...] = ()  # names to compare a wrong text with

    def __or__(self, other: Kind) -> Kind:
        return Kind(
            f"{self.words} or {other.words}",
            lambda value: self.has(value) or other.has(value),
            self.options + other.options,
        )


def check(where: str, error: type[HalfstepError], /, **given: tuple[object, Kind]) -> None:
    """Refuse the first of some arguments that is not of its kind."""
    for name, (value, kind) in given.items():
        if not kind.has(value):
            near = did_you_mean(value, kind.options)
            raise error(f"{where}: {name} must be {kind.words} and is {shown(value)}{near}")


LONGEST = 200  # characters of a value in a message


def shown(value: object) -> str:
    """Return a value that may be large as an error shows it."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print the longest
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, int, float, complex, type(None))) or DTYPE.has(value):
        words = repr(value[:LONGEST] if isinstance(value, (str, bytes)) else value)
        return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
    if isinstance(value, (list, tuple)):
        few = len(value) < 9 and all(type(one) in {str, int, float} for one in value)
        return repr(value) if few and len(repr(value)) <= LONGEST else f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


# ------------------------------------------------------------------ kinds


def a(*classes: type, words: str = "") -> Kind:
    """Return the instances of classes."""
    names = " or ".join(f"{'an' if c.__name__[0] in 'AEIOUaeiou' else 'a'} {c.__name__}" for c in classes)
    return Kind(words or names, lambda value: isinstance(value, classes))


def one_of(*options: str) -> Kind:
    """Return some texts."""
    return Kind(f"one of {', '.join(map(repr, options))}", lambda v: isinstance(v, str) and v in options, options)


def listed(kind: Kind, words: str) -> Kind:
    """Return lists, tuples and other iterables of a kind, but no text, no mapping and no tensor."""

    def has(value: Any) -> bool:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            return False
        if TENSOR.has(value) or MODEL.has(value):
            return False
        return isinstance(value, (range, map, filter)) or all(map(kind.has, value))

    return Kind(words, has)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in {"bool", "bool_"})


def whole(low: int = 0, high: int = LARGEST, *, of: str = "") -> Kind:
    """Return the kind of whole numbers within bounds; `of` says what they count."""
    words = f"a whole number{of and ' of '}{of} from {low}{'' if high == LARGEST else f' to {high}'}"

    def has(value: Any) -> bool:
        return not isinstance(value, (bool, float)) and isinstance(value, Integral) and low <= int(value) <= high

    return Kind(words, has)


def number(low: float = -math.inf, high: float = math.inf, *, finite: bool = True) -> Kind:
    """Return the kind of numbers within bounds; ``finite=False`` allows infinities and nan."""

    def test(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        try:
            known = float(value)
        except OverflowError:
            return False
        return low <= known <= high and math.isfinite(known) if finite else True

    bounds = "" if low == -math.inf else f" from {low:g}" + ("" if high == math.inf else f" to {high:g}")
    return Kind(f"a {'finite ' if finite else ''}number{bounds}", test)


def _is_path(value: object) -> bool:
    try:
        text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    except TypeError:
        return False
    return isinstance(text, str) and bool(text) and "\0" not in text


def _of_torch(name: str, words: str) -> Kind:
    """Return the instances of a class of torch; there are none before it is imported, which is not done for that."""

    def has(value: object) -> bool:
        return "torch" in sys.modules and isinstance(value, attrgetter(name)(sys.modules["torch"]))

    return Kind(words, has)


NONE = Kind("None", lambda value: value is None)
FLAG = Kind("True or False", _is_flag)
COUNT = whole(1)
WHOLE = whole()
INDEX = Kind("a whole number", whole(-LARGEST - 1).has)
NOT_NEGATIVE = number(0.0)
POSITIVE = Kind("a positive finite number", lambda value: NOT_NEGATIVE.has(value) and value > 0)
FRACTION = Kind("a number from 0 to 1", number(0.0, 1.0).has)
TEXT = a(str, words="a text")
PATH = Kind("a path", _is_path)
CALLABLE = Kind("callable", lambda value: callable(value) and not isinstance(value, type))
MODEL = _of_torch("nn.Module", "a torch.nn.Module")
OPTIMIZER = _of_torch("optim.Optimizer", "a torch optimizer")
TENSOR = _of_torch("Tensor", "a tensor")
DTYPE = _of_torch("dtype", "a torch.dtype")
DEVICE_TYPE = a(str, words="a string such as 'cuda'")


# ------------------------------------------------------------------ attributes


def fixed(name: str, remedy: str, kept: str = "") -> Any:
    """Return an attribute that refuses to be assigned; reading it costs no Python call."""

    def refuse(owner: object, value: object) -> None:
        raise SettingError(f"{type(owner).__name__}.{name} is fixed when the object is built; {remedy}")

    return property(attrgetter(kept or f"_{name}"), refuse)
