"""`halfstep explain` prints the page that a verdict points to."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from halfstep.cli import app
from halfstep.lens.verdict import CAUSES, Verdict

DOCS = Path(__file__).resolve().parents[2] / "docs" / "verdicts"


def explain(*words: str) -> tuple[int, str]:
    run = CliRunner().invoke(app, ["explain", *words])
    return run.exit_code, run.stdout + run.stderr


def test_every_cause_has_a_page_that_is_the_one_of_the_documentation() -> None:
    for cause in ("", *CAUSES):
        _, command, name = Verdict(kind="overflow", cause=cause).page.split()
        code, shown = explain(name)
        kept = [line for line in (DOCS / f"{name}.md").read_text(encoding="utf-8").splitlines() if "<!--" not in line]
        assert command == "explain" and not code and shown.splitlines() == kept


def test_without_a_page_all_are_listed() -> None:
    code, shown = explain()
    assert not code and [line.split()[0] for line in shown.splitlines()] == sorted([*CAUSES, "unknown"])
    assert "The low format cannot hold a number of this step" in shown


def test_another_name_is_an_error_with_those_there_are() -> None:
    code, shown = explain("precison")
    assert code == 2 and "no page 'precison'; there are data, " in shown and "did you mean 'precision'?" in shown
