"""docs/lint.md: its snippets keep their promises, and the run it shows is a real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfstep.advise.lint import RULES
from halfstep.cli import app
from tests.snippets import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lint.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_its_snippets_keep_their_promises() -> None:
    assert run_page(PAGE) == 3


def test_the_run_it_shows_is_what_the_command_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    script, printed = (
        re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0] for kind in ("py", "text")
    )
    Path("train.py").write_text(script)
    result = CliRunner().invoke(app, ["lint", "train.py"])
    assert result.exit_code == 1 and result.stdout == printed


def test_its_table_of_rules_has_every_code_once() -> None:
    row = re.compile(r"^\| `(HS\d+)` to `(HS\d+)` \| (source|a traced step) ", re.MULTILINE)
    ranges = row.findall(PAGE.read_text(encoding="utf-8"))
    for code, rule in RULES.items():
        places = [where for first, last, where in ranges if first <= code <= last]
        assert places == ([] if code == "HS000" else ["a traced step" if rule.traced else "source"]), code
