"""Tables in Markdown, and the two kinds of places for them in a page.

A short table stands in the page, between the markers ``<!-- name -->`` and ``<!-- end -->``. A long one is only on the
site: the page has ``{{ name }}`` on a line of its own.
"""

from __future__ import annotations

import re
from typing import Any

BLOCK = re.compile(r"<!-- (?!end -->)([\w ]+) -->\n.*?<!-- end -->", flags=re.DOTALL)
PLACE = re.compile(r"^\{\{ ([\w ]+) \}\}$", flags=re.MULTILINE)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio(data: dict[str, Any] | None) -> str:
    return "-" if data is None else f"{data['median']:.3f} [{data['low']:.3f}, {data['high']:.3f}]"


def megabytes(value: int | None) -> str:
    """Return bytes in MB; what is smaller than a tenth in two digits."""
    if value is None:
        return "-"
    return f"{value / 1e6:.1f}" if not 0 < value < 5e4 else f"{value / 1e6:.2g}"


def whole(value: int | None) -> str:
    return "-" if value is None else str(value)


def names(text: str) -> set[str]:
    """Return the names of the tables that a page has or asks for."""
    return {*BLOCK.findall(text), *PLACE.findall(text)}


def complete(text: str, made: dict[str, str]) -> str:
    """Return a page with its long tables in their places."""
    return PLACE.sub(lambda place: made[place.group(1)], text)


def fill(text: str, made: dict[str, str]) -> str:
    """Return a page with the tables between its markers made again."""

    def put(match: re.Match[str]) -> str:
        name = match.group(1)
        return f"<!-- {name} -->\n{made[name]}\n<!-- end -->"

    return BLOCK.sub(put, text)
