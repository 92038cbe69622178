"""The traced half of the linter: a task, and what the rules find in one step of it."""

from __future__ import annotations

from pathlib import Path

from halfstep.advise.lint.registry import RULES
from halfstep.advise.lint.rule import LintFinding
from halfstep.advise.lint.tracing import rules  # noqa: F401  # its decorators fill CHECKS
from halfstep.advise.lint.tracing.trace import trace_step
from halfstep.errors import LintError
from halfstep.policy import Policy
from halfstep.tasks import Task, load_task, task_names


def task_of(target: str | Path | Task) -> Task:
    """Return a task, the one of this name, or the one that ``path/to/file.py:function`` returns."""
    if isinstance(target, Task):
        return target
    if ".py:" not in str(target) and str(target) not in task_names():
        raise LintError(
            f"target {str(target)!r} does not exist; expected a .py file, a folder, path/to/file.py:function "
            f"or one of {', '.join(task_names())}"
        )
    return load_task(str(target))


def check_task(task: Task, policy: Policy) -> list[LintFinding]:
    """Return what the traced rules find in one step of `task` under `policy`; an error of the task is a finding."""
    trace = trace_step(task, policy)
    return [rule.finding(hit) for rule in RULES.values() if rule.traced for hit in rule.check(trace)]
