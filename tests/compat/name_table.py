"""A page's table of names: one row for each, and what becomes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"


class NameRow(NamedTuple):
    """One line of a table."""

    names: tuple[str, ...]
    verdict: str
    note: str


def rows(page: str) -> list[NameRow]:
    """Return the rows of the tables with three columns whose second is a verdict."""
    found = []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == 3 and cells[1] in VERDICTS:
            found.append(NameRow(tuple(re.findall(r"`([\w.]+)[^`]*`", cells[0])), cells[1], cells[2]))
    return found


VERDICTS = ("works", "differs", "absent", "torch's own")


def resolve(root: Any, name: str) -> Any:
    """Return what a dotted name stands for below `root`; AttributeError if there is nothing."""
    for word in name.split("."):
        root = getattr(root, word)
    return root


def exists(root: Any, name: str) -> bool:
    """Return whether a dotted name stands for something below `root`."""
    try:
        resolve(root, name)
    except AttributeError:
        return False
    return True


def repeated(table: list[NameRow]) -> Iterator[str]:
    """Yield the names that have more than one row."""
    names = [name for row in table for name in row.names]
    yield from sorted({name for name in names if names.count(name) > 1})
