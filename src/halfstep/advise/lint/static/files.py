"""The rule about files: one that cannot be read is a finding, so that a folder is never passed over in silence."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.script import Script

__all__ = ["FILE_RULES"]


def _nothing(script: Script) -> Iterator[Hit]:
    """Yield nothing: a script that was parsed has no such mistake; `run.py` reports the others."""
    del script
    yield from ()


FILE_RULES = (
    Rule(
        code="HS000",
        severity="warning",
        title="a file of a folder cannot be parsed",
        why="Nothing in the file was checked.",
        fix="Correct its syntax, or leave it out of the folder.",
        bad="def train(:\n    pass",
        good="def train():\n    pass",
        check=_nothing,
    ),
)
