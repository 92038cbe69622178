"""The concept pages: snippets run and give what stands beside them, tables are the code's, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.snippets import run_page, snippets

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs" / "concepts").glob("*.md"))
CONCEPTS = ("formats", "policy", "region", "scale", "weights", "step")


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


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
            assert {"pitfalls", "pointers"} <= anchors(page)
            assert len(snippets(page)) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_sources_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
    for source in re.findall(r"`((?:src|tests|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / source).exists(), source
