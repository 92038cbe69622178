"""The concept pages: snippets run and give what stands beside them, tables are the code's, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import concepts
from benchmarks.concepts import blocks, stale_pages
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


def test_tables_are_what_the_code_says() -> None:
    assert stale_pages() == [], "run `make tables`"


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("concepts/formats.md", "| 65504 |", "| 65505 |"), ("tables/weights.md", "| 17.95 |", "| 17 |")],
)
def test_a_number_changed_by_hand_is_noticed(
    name: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    page = tmp_path / name
    page.parent.mkdir()
    page.write_text(text.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(concepts, "DOCS", tmp_path)
    assert stale_pages() == [page.name]
    assert stale_pages(write=True) == [page.name]
    assert page.read_text(encoding="utf-8") == text


def test_every_table_the_code_makes_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in concepts.pages())
    assert set(re.findall(r"<!-- ([\w ]+) -->", text)) - {"end"} == set(blocks())


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
