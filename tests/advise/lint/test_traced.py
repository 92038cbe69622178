"""Traced rules: each finds its example's mistake, and nothing in the same file without it."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfstep as hs
from halfstep.advise.lint.rule import LintFinding, Rule
from halfstep.advise.lint.traced import TRACED_RULES, check_task
from halfstep.tasks import load_task


def found(text: str, under: str, folder: Path) -> list[LintFinding]:
    """Return what the traced rules find in the task of a file with `text`, under a policy "NAME" or "NAME:DTYPE"."""
    path = folder / "example.py"
    path.write_text(text, encoding="utf-8")
    name, _, dtype = under.partition(":")
    policy = hs.Policy.of(name, dtype=dtype) if dtype else hs.Policy.of(name)
    return check_task(load_task(f"{path}:task"), policy)


@pytest.mark.parametrize("rule", TRACED_RULES, ids=lambda rule: rule.code)
def test_a_rule_finds_its_mistake_and_not_its_remedy(rule: Rule, tmp_path: Path) -> None:
    bad = [f for f in found(rule.bad, rule.under, tmp_path) if f.code == rule.code]
    assert bad, rule.bad
    assert all(f.file.endswith("example.py") and f.line > 0 for f in bad), bad
    good = found(rule.good, rule.under, tmp_path)
    assert not [f for f in good if f.code in (rule.code, "HS133")], good
