"""docs/audit.md: its snippets run and give what stands beside them, and it lists every kind of finding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep.lens.finding import KINDS
from tests.snippets import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "audit.md"


def test_its_snippets_keep_their_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(PAGE) >= 6
    assert "underflow: " in capsys.readouterr().out


def test_it_lists_every_kind_of_finding() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Findings")[2].partition("## Rows")[0]
    assert re.findall(r"^\| `?([a-z_]+)`? \|", text, re.MULTILINE) == ["kind", *KINDS]
