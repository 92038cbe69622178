from __future__ import annotations

from pathlib import Path

from tests.snippets import run_page

PAGE = Path(__file__).parent.parent.parent / "docs" / "counting.md"


def test_the_page_does_what_it_says() -> None:
    assert run_page(PAGE) == 3
