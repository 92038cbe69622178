"""The concept pages: snippets run and give what stands beside them, and the sources that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_site.links import anchors
from tests.snippets import run_page, snippets

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs" / "concepts").glob("*.md"))
CONCEPTS = ("formats", "policy", "region", "scale", "weights", "step")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run_in_order_and_keep_their_promises(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = run_page(page)
    assert kept >= (8 if page.stem in CONCEPTS else 0)


def test_every_concept_has_a_page_with_pitfalls_and_pointers() -> None:
    assert {page.stem for page in PAGES} == {"README", *CONCEPTS}
    for page in PAGES:
        if page.stem in CONCEPTS:
            assert {"pitfalls", "pointers"} <= anchors(page.read_text(encoding="utf-8"))
            assert len(snippets(page)) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sources_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for source in re.findall(r"`((?:src|tests|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / source).exists(), source
