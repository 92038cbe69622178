"""The page on serving keeps its promises."""

from __future__ import annotations

import re
from pathlib import Path

from tests.snippets import run_page

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "serving.md"


def test_snippets_run_and_keep_their_promises() -> None:
    assert run_page(PAGE) == 6


def test_files_exist() -> None:
    for path in re.findall(r"`((?:src|benchmarks)/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path
