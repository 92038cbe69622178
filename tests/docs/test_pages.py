"""The pages for users that have no test file of their own: snippets run from top to bottom and give what they state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfstep.compat.apex.amp.handle import close_casts
from tests.snippets import run_page, snippets

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
NAMES = (
    "index",
    "start",
    "troubleshooting",
    "faq",
    "limits",
    "platforms",
    "versioning",
    "security",
    "compare",
    "upstream",
)
PAGES = sorted(page for page in [*DOCS.glob("howto/*.md"), *(DOCS / f"{name}.md" for name in NAMES)] if page.exists())


@pytest.fixture(autouse=True)
def casts_end(clean_start: None) -> Iterator[None]:
    """Close the casts of Apex's O1, which are the process's from `amp.initialize` on."""
    yield
    close_casts()


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.stem)
def test_snippets_run_in_order_and_keep_their_promises(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_page(page)
