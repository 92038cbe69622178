"""The lists: every fault and control, in the order in which they stand in their files."""

from __future__ import annotations

from types import ModuleType
from typing import TypeVar

from tests.faults import backward, forward, healthy, losses, quiet, ranks, state
from tests.faults.case import Control, Fault

__all__ = ["CONTROLS", "DEFINITIONS", "LIST_A", "LIST_A_RANKS", "LIST_B", "entries"]

Entry = TypeVar("Entry")

DEFINITIONS = ("backward", "case", "forward", "healthy", "losses", "quiet", "ranks", "score", "state")
"""Files, without their ending, whose hashes `frozen.txt` keeps."""


def entries(kind: type[Entry], *files: ModuleType) -> tuple[Entry, ...]:
    """Return what files define of a kind, in the order of their lines."""
    return tuple(v for file in files for v in vars(file).values() if isinstance(v, kind))


LIST_A = entries(Fault, forward, losses, backward, state)
"""Faults that end in a non-finite step, in one process."""

LIST_A_RANKS = entries(Fault, ranks)
"""The same in two processes; they are built inside each."""

LIST_B = entries(Fault, quiet)
"""Faults that stay finite."""

CONTROLS = entries(Control, healthy)
"""Healthy programs."""
