"""docs/diagnosis.md: its snippets run and give what stands beside them, and the report it shows is theirs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import halfstep as hs
from tests.snippets import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md"
WHERE = 5
"""Lines of a report that say what happened and where; cures follow."""


def test_its_snippets_keep_their_promises_and_its_report_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    assert run_page(PAGE, names) == 2
    printed = capsys.readouterr().out.splitlines()
    assert "\n".join(["```", *printed[:WHERE], ""]) in PAGE.read_text(encoding="utf-8")
    assert isinstance(names["task"](), hs.Task)


def test_every_kind_of_verdict_is_in_its_table() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Reading a verdict")[2].partition("`op` is")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE) == [
        "overflow", "invalid", "bad_batch", "bad_state", "scale_too_high", "not_reproducible",
    ]  # fmt: skip
