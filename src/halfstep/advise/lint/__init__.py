"""Lint: find mistakes of mixed precision in a script or a task before it runs."""

from halfstep.advise.lint.rule import RULES, SEVERITIES, Hit, LintFinding, Rule, explained, rule_of
from halfstep.advise.lint.run import lint

__all__ = ["RULES", "SEVERITIES", "Hit", "LintFinding", "Rule", "lint", "explained", "rule_of"]
