"""The lists: every fault and control, in the order in which they stand in their files."""

from __future__ import annotations

from tests.faults import backward, forward, losses, state
from tests.faults.case import Fault

__all__ = ["LIST_A"]

LIST_A: tuple[Fault, ...] = tuple(v for file in (forward, losses, backward, state) for v in vars(file).values() if isinstance(v, Fault))
