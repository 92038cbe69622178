"""Traced rules: what one traced training step of a task shows."""

from __future__ import annotations

from halfstep.advise.lint.rule import LintFinding, Rule
from halfstep.tasks import Task

__all__ = ["TRACED_RULES", "check_task"]

TRACED_RULES: tuple[Rule, ...] = ()
"""The rules, in the order of their codes, from HS101 on."""


def check_task(task: Task) -> list[LintFinding]:
    """Return what the traced rules find in one step of `task`."""
    del task
    return []
