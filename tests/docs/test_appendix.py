"""The pages of conclusions and docs/tables/: short, with tables that fit a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_site.tables import completed

DOCS = Path(__file__).resolve().parents[2] / "docs"
LONG = (
    "performance",
    "reliability",
    "diagnosis",
    "lint",
    "engines",
    "integrations",
    "concepts/weights",
    "concepts/step",
)
CONCLUSIONS = [DOCS / f"{name}.md" for name in LONG]
TABLES = sorted((DOCS / "tables").glob("*.md"))
WORDS = 1500  # of prose: three pages
COLUMNS = 7  # what a page of 1200 px shows without scrolling

FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"!\[[^\]]+\]\([^)]+\)")


def prose(page: Path) -> str:
    """Return a page without code, pictures and tables."""
    text = IMAGE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


@pytest.mark.parametrize("page", CONCLUSIONS, ids=lambda page: page.stem)
def test_a_page_of_conclusions_is_short_and_links_its_tables(page: Path) -> None:
    assert len(prose(page).split()) <= WORDS
    assert "tables/" in prose(page)


@pytest.mark.parametrize("page", [*CONCLUSIONS, *TABLES], ids=lambda page: page.stem)
def test_tables_fit_a_page(page: Path) -> None:
    text = FENCE.sub("", completed(page.read_text(encoding="utf-8")))
    assert max((row.count("|") - 1 for row in re.findall(r"^\|[ -|]+\|$", text, re.MULTILINE)), default=0) <= COLUMNS


def test_every_page_of_tables_is_in_the_list_and_starts_with_its_use() -> None:
    listed = (DOCS / "tables" / "README.md").read_text(encoding="utf-8")
    for page in TABLES:
        lines = page.read_text(encoding="utf-8").splitlines()
        assert page.stem == "README" or f"]({page.name})" in listed, page.name
        assert lines[0].startswith("# ") and not lines[1] and len(lines[2].split()) > 4, page.name
