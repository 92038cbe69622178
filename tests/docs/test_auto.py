"""docs/auto.md: its snippets run and give what stands beside them, and its numbers are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.auto import choose, trial
from tests.snippets import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "auto.md"


def test_its_snippets_keep_their_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_page(PAGE) == 6
    assert capsys.readouterr().out.startswith("auto: ")


def test_its_numbers_are_those_of_the_code() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for words in (
        f"by more than {choose.MARGIN:.0%}",
        f"A turn has {trial.STEPS} steps",
        f"until they take {trial.TIMED} seconds",
        f"at most {choose.TURNS} turns, so a choice takes at most {trial.STEPS * choose.TURNS + 1} steps",
        f"faster by more than {choose.CLOSE:.0%} in both",
        f"({choose.BEGIN:.0f} seconds, and {choose.PER_NODE} for each autograd node of the loss)",
        f"at most {choose.BUDGET:.0f} seconds, and at most that of {choose.PAYBACK:,} eager steps",
        f"a run of {10 * choose.PAYBACK:,} steps",
    ):
        assert words in text, words
