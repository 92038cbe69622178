"""The long tables of the site: where a page in docs/ has ``{{ name }}`` on a line of its own.

    python -m docs_site.tables docs/lint.md   # prints the page with its tables, without building the site

They are not kept in the tree. They are made when the site is built, from benchmarks/results/ and from the code: what
`benchmarks.tables` makes, the matrix of promises and the options of the commands.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from benchmarks import tables
from benchmarks.markdown import complete
from benchmarks.reports import committed
from docs_site import commands
from tests.promises.page import blocks

__all__ = ["completed", "made"]


@cache
def made() -> dict[str, str]:
    """Return every table by its name; it takes some 15 seconds, in which small models are trained."""
    return {**tables.blocks(committed()), **blocks(), "command line": commands.described_all()}


def completed(text: str) -> str:
    """Return a page as the site has it.

    Raises:
        KeyError: the page asks for a table that does not exist.
    """
    return complete(text, made()) if "{{ " in text else text


if __name__ == "__main__":
    print(completed(Path(sys.argv[1]).read_text(encoding="utf-8")))
