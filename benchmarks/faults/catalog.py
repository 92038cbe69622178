"""The lists: every fault and control, in the order in which they stand in their files.

The programs of the second and later sets were written without a look at what the instruments say of them.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TypeVar

from benchmarks.faults import backward, forward, fourth, healthy, losses, quiet, ranks, state
from benchmarks.faults.case import Control, Fault
from benchmarks.faults.second import backward as backward_2
from benchmarks.faults.second import forward as forward_2
from benchmarks.faults.second import healthy as healthy_2
from benchmarks.faults.second import losses as losses_2
from benchmarks.faults.second import quiet as quiet_2
from benchmarks.faults.second import state as state_2
from benchmarks.faults.story import stories

__all__ = [
    "CONTROLS",
    "DEFINITIONS",
    "FOURTH",
    "LIST_A",
    "LIST_A_RANKS",
    "LIST_B",
    "SECOND_A",
    "SECOND_B",
    "SECOND_CONTROLS",
    "THIRD",
]

Entry = TypeVar("Entry")

PROGRAMS = ("backward", "forward", "healthy", "losses", "quiet", "state")
TOLD = sorted(
    f"{path.parent.name}/{path.stem}"
    for path in Path(__file__).parent.glob("*/*.py")
    if path.parent.name in ("third", "fourth")
)
DEFINITIONS = (
    *("case", "ranks", "score", *PROGRAMS),
    *(f"second/{name}" for name in PROGRAMS),
    *("story", "story_score", *TOLD),
)
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

SECOND_A = entries(Fault, forward_2, losses_2, backward_2, state_2)
SECOND_B = entries(Fault, quiet_2)
SECOND_CONTROLS = entries(Control, healthy_2)

THIRD = stories()
"""Stories from public trackers, each with its root cause and a healthy twin."""

FOURTH = stories(fourth)
"""The same, written after the instruments had been changed by what the third set showed."""
