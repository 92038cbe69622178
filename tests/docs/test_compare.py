"""docs/compare.md: every cell has a source, every source is used, and what halfstep claims links to a page."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import compare_tables
from benchmarks.compare_tables import OPEN, OWN, cell_of
from docs_site.links import anchors
from docs_site.tables import completed

DATA = compare_tables.read()
DOCS = compare_tables.FILE.parent
TABLES = [pytest.param(made, id=made["name"]) for made in DATA["table"]]


@pytest.mark.parametrize("made", TABLES)
def test_every_cell_has_a_source_that_is_listed(made: dict[str, Any]) -> None:
    for question, *cells in made["rows"]:
        assert len(cells) + 1 == len(made["columns"]), question
        for column, text in zip(made["columns"][1:], cells, strict=True):
            said, sources = cell_of(text)
            assert said and bool(sources) == (said != OPEN), f"{question}, {column}: {text!r}"
            if column != OWN:
                assert set(sources) <= set(DATA["source"]), f"{question}, {column}: {text!r}"


@pytest.mark.parametrize("made", TABLES)
def test_what_halfstep_claims_links_to_a_place_that_exists(made: dict[str, Any]) -> None:
    own = made["columns"].index(OWN)
    for question, *cells in made["rows"]:
        (source,) = cell_of(cells[own - 1])[1]
        path, _, anchor = source.partition("#")
        text = completed((DOCS / path).read_text(encoding="utf-8"))
        assert not anchor or anchor in anchors(text), f"{question}: {source}"


@pytest.mark.parametrize("made", TABLES)
def test_a_table_fits_a_phone(made: dict[str, Any]) -> None:
    assert len(made["columns"]) <= 6
    assert all(len(cell_of(cell)[0]) <= 60 for row in made["rows"] for cell in row)


def test_every_source_is_used_and_names_what_was_read() -> None:
    used = {source for made in DATA["table"] for row in made["rows"] for cell in row[1:] for source in cell_of(cell)[1]}
    assert set(DATA["source"]) <= used
    for text in DATA["source"].values():
        assert "`" in text or "](" in text or "history" in text, text


def test_the_page_has_every_table() -> None:
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    assert re.findall(r"^{{ compare (.+) }}$", page, re.MULTILINE) == [made["name"] for made in DATA["table"]]
