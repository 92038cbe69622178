"""Traced rules: what one traced training step of a task shows."""

from __future__ import annotations

from pathlib import Path

from halfstep.advise.lint.rule import LintFinding, Rule
from halfstep.policy import Policy
from halfstep.tasks import Task

__all__ = ["TRACED_RULES", "check_task"]

TRACED_RULES: tuple[Rule, ...] = ()
"""The rules, in the order of their codes, from HS101 on."""


def check_task(task: Task, policy: Policy | str | Path = "mixed", device: str = "cpu") -> list[LintFinding]:
    """Return what the traced rules find in one step of `task`."""
    del task, policy, device
    return []
