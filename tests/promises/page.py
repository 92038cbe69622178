"""The tables of docs/promises.md, made of the cells that the tests check."""

from __future__ import annotations

import re

from benchmarks.markdown import table
from tests.promises.entries import ENTRIES
from tests.promises.fields import FIELDS
from tests.promises.matrix import cell_of
from tests.promises.options import OPTIONS

__all__ = ["blocks"]


def _noted(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table whose cells are single words, with what else they say in numbered notes below it."""
    notes: dict[str, int] = {}

    def short(cell: str) -> str:
        word, mark, words = re.split(r"([:;] |$)", cell, maxsplit=1)
        return f"{word} ({notes.setdefault(words, len(notes) + 1)})" if mark else word

    made = table(columns, [[row[0], *map(short, row[1:])] for row in rows])
    listed = "\n".join(f"{number}. {words[0].upper()}{words[1:]}." for words, number in notes.items())
    return f"{made}\n\n{listed}"


def entry_points() -> str:
    """Return fields x entry points of halfstep."""
    rows = [[f"`{field.name}`", *(cell_of(field, entry).text() for entry in ENTRIES)] for field in FIELDS]
    return _noted(["field", *(entry.name for entry in ENTRIES)], rows)


def front_ends() -> str:
    """Return fields x front-ends of other libraries."""
    rows = [[f"`{field.name}`", *(OPTIONS[name][field.name].text() for name in OPTIONS)] for field in FIELDS]
    return _noted(["field", *OPTIONS], rows)


def tests() -> str:
    """Return what is observed of each field, and for which values."""
    rows = []
    for field in FIELDS:
        values = ", ".join(f"`{value.given!r}`" for value in field.values)
        rows.append([f"`{field.name}`", field.says, values])
    return table(["field", "what is observed", "values"], rows)


def blocks() -> dict[str, str]:
    """Return the tables by their names."""
    return {"entry points": entry_points(), "front ends": front_ends(), "observed": tests()}
