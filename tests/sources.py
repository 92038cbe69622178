"""Source files as syntax: a text that several tests read is parsed once in a process."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a source text; nobody changes it."""
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return every node of a source text in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(text)))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and the statements below it in the order of `ast.walk`; expressions hold none."""
    todo = deque([node])
    while todo:
        yield (one := todo.popleft())
        todo += (child for child in ast.iter_child_nodes(one) if isinstance(child, BLOCKS))


def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file."""
    return parsed(path.read_text(encoding="utf-8"))


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file in the order of `ast.walk`."""
    return nodes(path.read_text(encoding="utf-8"))
