"""docs/diagnosis.md: its snippets run and give what stands beside them, and the report it shows is theirs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import halfstep as hs
from tests.snippets import run_page

VERDICTS = sorted((Path(__file__).resolve().parents[2] / "docs" / "verdicts").glob("*.md"))
PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md"
WHERE = 22
"""Lines of a report up to its first cure."""


def test_its_snippets_keep_their_promises_and_its_report_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    assert run_page(PAGE, names) == 2
    printed = capsys.readouterr().out.splitlines()
    assert "\n".join(["```", *printed[:WHERE], ""]) in PAGE.read_text(encoding="utf-8")
    assert isinstance(names["task"](), hs.Task)


def test_every_kind_of_verdict_is_in_its_table() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Reading a verdict")[2].partition("`op` is")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE) == [
        "overflow", "invalid", "bad_batch", "bad_state", "scale_too_high", "loop", "not_reproducible",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale:UserWarning")
@pytest.mark.parametrize(
    "page", [page for page in VERDICTS if "```python" in page.read_text(encoding="utf-8")], ids=lambda page: page.stem
)
def test_the_example_of_a_cause_is_one(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    assert run_page(page, names) == 1
    assert names["step"].explain().cause == page.stem
