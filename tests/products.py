"""Products of parameters of which `make test` runs a sample."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(*axes: Iterable[Any], every: int = 2, rest: pytest.MarkDecorator = pytest.mark.hours) -> list[Any]:
    """Return all combinations of values as parameters; most of them run with the tests of the mark `rest` only.

    The others are those whose places along the axes add up to a multiple of `every`. Of two axes they have every value;
    of three axes or more with as many values each, every pair of values.
    """
    numbered = [list(enumerate(axis)) for axis in axes]
    found = []
    for combination in product(*numbered):
        marks = rest if sum(place for place, _ in combination) % every else ()
        found.append(pytest.param(*(value for _, value in combination), marks=marks))
    return found
