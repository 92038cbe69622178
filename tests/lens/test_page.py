"""docs/lens.md: snippets run and give what stands beside them, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfstep.lens.finding import KINDS
from tests.snippets import run_page

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "lens.md"
RECORDS = ROOT / "src" / "halfstep" / "lens" / "monitor" / "records.py"


def test_snippets_keep_their_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(PAGE) >= 16


def test_kinds_of_findings_are_those_of_the_audit() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| kind |")[2].partition("\n\n")[0]
    seen = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    said = set(re.findall(r'"(\w+)", (?:"\w|role|1)', RECORDS.read_text(encoding="utf-8"))) & set(KINDS)
    assert seen == said


def test_files_it_names_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src|tests)/[\w./]+)`", text) + re.findall(r"\]\(\.\./([\w./]+)\)", text):
        assert (ROOT / path).exists(), path
