"""The page on checkpoints keeps its promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snippets import run_page

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "checkpoints.md"


def test_snippets_run_and_keep_their_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) == 8
