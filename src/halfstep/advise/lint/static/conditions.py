"""Conditions: what is known of the truth of conditions on a path."""

from __future__ import annotations

import ast
import re

__all__ = ["VARYING", "assume", "words"]

VARYING = re.compile(r"[%<>]|==|!=|\(")
"""Conditions whose truth is another one in the next iteration of a loop."""


def words(text: str) -> set[str]:
    """Return the names in a condition."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def assume(test: ast.expr, truth: bool, known: dict[str, bool]) -> bool:
    """Note that a condition is `truth`; return False if that contradicts what is known."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return assume(test.operand, not truth, known)
    if isinstance(test, ast.Constant):
        return bool(test.value) is truth
    if isinstance(test, ast.BoolOp) and truth is isinstance(test.op, ast.And):
        return all(assume(value, truth, known) for value in test.values)
    text = ast.unparse(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        if ast.unparse(test.comparators[0]) == "None":
            text, truth = f"{ast.unparse(test.left)} is None", truth is isinstance(test.ops[0], ast.Is)
            if truth and not _note(ast.unparse(test.left), False, known):
                return False
    elif truth and not _note(f"{text} is None", False, known):
        return False
    return _note(text, truth, known)


def _note(text: str, truth: bool, known: dict[str, bool]) -> bool:
    return known.setdefault(text, truth) is truth
