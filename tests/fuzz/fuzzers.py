"""The table of fuzzers. A fuzzer makes a random program from a seed, runs it, and says what is wrong with the result.

A fuzzer is a module of this folder with these names:
    check(seed) -> str: "" if the program of this seed behaved as it should, else what happened and what was expected.
    report() -> str, which may be absent: a table of the programs checked so far.
    SAMPLE: how many seeds, from 0, the tests check (a few seconds); `make fuzz` goes on from there.

A program depends on its seed alone, so that a finding is repeated by its seed. Where a difference from a peer is
intended, the fuzzer classifies it by a rule that its module docstring states.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

__all__ = ["FUZZERS", "checker", "report", "sample"]

FUZZERS: tuple[str, ...] = ("programs", "scaler", "interrupts", "policies", "contents", "arguments")
"""Names of modules of this folder."""


def checker(name: str) -> Callable[[int], str]:
    """Return the `check` of a fuzzer."""
    check: Callable[[int], str] = importlib.import_module(f"tests.fuzz.{name}").check
    return check


def report(name: str) -> str:
    """Return what a fuzzer reports of the programs it has checked."""
    made: Callable[[], str] = getattr(importlib.import_module(f"tests.fuzz.{name}"), "report", str)
    return made()


def sample(name: str) -> range:
    """Return the seeds of a fuzzer that the tests check."""
    return range(importlib.import_module(f"tests.fuzz.{name}").SAMPLE)
