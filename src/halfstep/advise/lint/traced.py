"""Traced rules: what one traced training step of a task shows."""

from __future__ import annotations

from pathlib import Path

from halfstep.advise.lint.rule import LintFinding, Rule
from halfstep.advise.lint.tracing.operator_rules import OPERATOR_RULES
from halfstep.advise.lint.tracing.step_rules import STEP_RULES
from halfstep.advise.lint.tracing.trace import trace_step
from halfstep.advise.lint.tracing.value_rules import VALUE_RULES
from halfstep.advise.lint.tracing.weight_rules import WEIGHT_RULES
from halfstep.policy import Policy
from halfstep.tasks import Task

__all__ = ["TRACED_RULES", "check_task"]

TRACED_RULES: tuple[Rule, ...] = (*WEIGHT_RULES, *OPERATOR_RULES, *VALUE_RULES, *STEP_RULES)
"""The rules, in the order of their codes, from HS101 on."""


def check_task(task: Task, policy: Policy | str | Path = "mixed", device: str = "cpu") -> list[LintFinding]:
    """Return what the traced rules find in one step of `task`.

    The step trains a new model of the task, under `policy`; a second one from the same start shows whether it is
    reproducible. Generators of random numbers go on as if neither had run.

    Args:
        task: a task; an error that it raises is a finding.
        policy: preset name, TOML path or Policy.
        device: where to train.

    Raises:
        PolicyError: no such policy.
    """
    trace = trace_step(task, Policy.of(policy), device)
    return [rule.finding(hit) for rule in TRACED_RULES for hit in rule.check(trace)]
