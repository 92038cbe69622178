"""Static rules on scripts as they are written: aliases, branches, helpers, several optimizers; each with its findings."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.advise.lint.test_rules import found

CASES: dict[str, tuple[set[str], str]] = {}


def case(name: str, *codes: str):  # type: ignore[no-untyped-def]  # a decorator of documents
    def add(function):  # type: ignore[no-untyped-def]
        CASES[name] = (set(codes), dedent(function.__doc__))
        return function

    return add
