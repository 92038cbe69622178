from __future__ import annotations

from pathlib import Path

from tests.snippets import run_page

PAGE = Path(__file__).parent.parent.parent / "docs" / "counting.md"


def test_the_snippets_of_the_page_run() -> None:
    assert run_page(PAGE) == 3
