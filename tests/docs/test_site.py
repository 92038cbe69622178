"""The site and the pages for it: navigation and files agree, links and anchors lead somewhere, pictures have words."""

from __future__ import annotations

import re

import pytest

from benchmarks.markdown import BLOCK, PLACE
from docs_site.links import ROOT, anchors, images, links, masked, repository_path, rewritten, site_uri
from docs_site.tables import completed, made

DOCS = ROOT / "docs"
PAGES = [p.relative_to(ROOT).as_posix() for p in sorted(DOCS.rglob("*.md"))]
OUTSIDE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"]
OUTSIDE += [name for name in ("SECURITY.md",) if (ROOT / name).exists()]
WORDS = 4
"""An alternative text states what a picture shows, in so many words at least."""
ALL_WORDS = 90_000
"""The most words of all pages together, as they are in docs/: without the long tables of the site."""


SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
LISTED = re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", SETTINGS.partition("\nnav:\n")[2], re.MULTILINE)


def broken(text: str, page: str) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for link in links(text, page):
        path = ROOT / link.file
        if (not path.exists() and link.file != page) or ROOT not in [path, *path.parents]:
            found.append(link.target)
        elif link.anchor and path.suffix == ".md":
            there = text if link.file == page else completed(path.read_text(encoding="utf-8"))
            if link.anchor not in anchors(there) and not link.anchor.startswith("halfstep."):
                found.append(link.target)
    return found


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    assert len(LISTED) == len(set(LISTED)) > 50
    assert [name for name in LISTED if not (ROOT / source(name)).is_file()] == []
    assert {site_uri(page) for page in PAGES} - set(LISTED) == set()
    assert {site_uri(p.relative_to(ROOT).as_posix()) for p in DOCS.rglob("*.ipynb")} - set(LISTED) == set()


def source(uri: str) -> str:
    """Return the file for which a page of the site stands."""
    return re.sub(r"\.ipynb\.md$", ".ipynb", repository_path(uri))


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE])
def test_links_lead_somewhere_and_pictures_have_words(page: str) -> None:
    text = completed((ROOT / page).read_text(encoding="utf-8"))
    assert broken(text, page) == []
    assert [target for alt, target in images(text) if len(alt.split()) < WORDS] == []
    assert text.startswith("# ") and len(re.findall(r"^# ", masked(text), re.MULTILINE)) == 1


def test_the_pages_have_no_more_words_than_a_person_can_keep_right() -> None:
    assert sum(len((ROOT / page).read_text(encoding="utf-8").split()) for page in PAGES) <= ALL_WORDS


def test_what_stands_beside_the_pages_is_a_tenth_of_them_at_most() -> None:
    outside = [ROOT / page for page in OUTSIDE] + sorted((ROOT / "src").rglob("*.md"))
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in outside) <= ALL_WORDS // 10


def test_a_long_table_is_on_one_page_and_every_table_is_on_a_page() -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in ["README.md", *PAGES]]
    long = [name for text in texts for name in PLACE.findall(text)]
    assert len(long) == len(set(long)) > 30
    assert {*long, *(name for text in texts for name in BLOCK.findall(text))} == set(made())


def test_a_broken_link_is_found_and_code_has_none() -> None:
    text = "# A b\n\n[a](#a-b) [b](#a-c) [c](faq.md) [d](../gone.py) [e](http://x.y/z)\n\n```\n[f](gone)\n```\n\n`[g](gone)`\n"
    assert set(broken(text, "docs/concepts/x.md")) == {"#a-c", "faq.md", "../gone.py"}


def test_anchors_are_those_of_a_code_host() -> None:
    text = "# Über `x`\n\n## Two  words, [a](b.md)\n\n## Again\n\n## Again\n\n```\n# none\n```\n"
    assert anchors(text) == {"über-x", "two--words-a", "again", "again-1"}


def test_links_are_rewritten_for_the_site() -> None:
    text = "[a](../README.md#top) [b](../examples/gan.py) [c](concepts/README.md) [d](../benchmarks/results/cpu.json)"
    assert rewritten(text, "docs/index.md") == (
        "[a](source/README.md#top) [b](source/examples/gan.py.md) [c](concepts/README.md) "
        "[d](source/benchmarks/results/cpu.json)"
    )
    assert rewritten("[a](docs/concepts/step.md#x) ![b](docs/architecture.svg)", "CONTRIBUTING.md") == (
        "[a](../concepts/step.md#x) ![b](../architecture.svg)"
    )


def test_pages_fetch_nothing() -> None:
    assert "\n  font: false" in SETTINGS
    for asset in [ROOT / "mkdocs.yml", *(DOCS / "assets").iterdir()]:
        assert not re.search(r"https?://|@import", asset.read_text(encoding="utf-8")), asset.name
