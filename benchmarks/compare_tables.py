"""The tables of docs/compare.md, from docs/compare.toml: every cell with its source, numbered below its table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.markdown import table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["cell_of", "compare_tables", "read"]

FILE = Path(__file__).resolve().parent.parent / "docs" / "compare.toml"
OWN = "halfstep"  # the column whose cells link to pages
OPEN = "not checked"


def read() -> dict[str, Any]:
    """Return the data."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def cell_of(text: str) -> tuple[str, list[str]]:
    """Return what a cell says, and its sources."""
    said, _, sources = text.partition(" @")
    return said, sources.split(",") if sources else []


def compare_tables() -> dict[str, str]:
    """Return each table with the list of its sources, by "compare " and its name."""
    data = read()
    return {f"compare {made['name']}": _one(made, data["source"]) for made in data["table"]}


def _one(made: dict[str, Any], known: dict[str, str]) -> str:
    """Return one table; a source has the number of its first use in it."""
    numbers: dict[str, int] = {}
    rows = []
    for question, *cells in made["rows"]:
        row = [question]
        for column, text in zip(made["columns"][1:], cells, strict=True):
            said, sources = cell_of(text)
            if column == OWN:
                row.append(f"[{said}]({sources[0]})")
            elif sources:
                marks = ", ".join(str(numbers.setdefault(source, len(numbers) + 1)) for source in sources)
                row.append(f"{said} ({marks})")
            else:
                row.append(said)
        rows.append(row)
    listed = "\n".join(f"{number}. {known[source]}" for source, number in numbers.items())
    return f"{table(made['columns'], rows)}\n\nSources:\n\n{listed}"
