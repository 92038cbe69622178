"""The table of fuzzers. A fuzzer makes a random program from a seed, runs it, and says what is wrong with the result.

A fuzzer is a module of this folder with two names:
    check(seed) -> str: "" if the program of this seed behaved as it should, else what happened and what was expected.
    SAMPLE: how many seeds, from 0, the default test run checks (a few seconds); `make fuzz` goes on from there.

A program depends on its seed alone, so that a finding is repeated by its seed. Where a difference from a peer is
intended, the fuzzer classifies it by a rule that its module docstring states.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

__all__ = ["FUZZERS", "checker", "sample"]

FUZZERS: tuple[str, ...] = ("programs", "scaler", "interrupts", "policies")
"""Names of modules of this folder."""


def checker(name: str) -> Callable[[int], str]:
    """Return the `check` of a fuzzer."""
    check: Callable[[int], str] = importlib.import_module(f"tests.fuzz.{name}").check
    return check


def sample(name: str) -> range:
    """Return the seeds of a fuzzer that the default test run checks."""
    return range(importlib.import_module(f"tests.fuzz.{name}").SAMPLE)
