"""The catalogue of mistakes: one wording each, in the linter, the black box, the scaler's errors and the page."""

from __future__ import annotations

import re
from pathlib import Path

from halfstep.advise.lint import RULES
from halfstep.mistakes import MISTAKES

ROOT = Path(__file__).parent.parent
SOURCES = [*(ROOT / "src/halfstep/scale").glob("*.py"), ROOT / "src/halfstep/lens/box/loop.py"]


def test_each_is_whole_and_stands_under_its_number() -> None:
    for code, mistake in MISTAKES.items():
        assert (
            code == mistake.code
            and re.fullmatch(r"HS[02]\d\d", code)
            and mistake.severity in {"error", "warning", "note"}
        )
        assert mistake.why.endswith(".") and mistake.fix.endswith(".") and not mistake.title.endswith(".")
        assert mistake.remedy.endswith(f" ({code})") and "`" not in mistake.remedy


def test_the_linter_finds_those_below_200_in_their_words() -> None:
    for code, mistake in MISTAKES.items():
        assert (code in RULES) == (code < "HS200"), code
        if code in RULES:
            rule = RULES[code]
            assert (rule.title, rule.why, rule.fix) == (mistake.title, mistake.why, mistake.fix)


def test_what_runs_names_mistakes_that_there_are_and_the_others_are_the_linters() -> None:
    named = {code for path in SOURCES for code in re.findall(r"HS\d\d\d", path.read_text(encoding="utf-8"))}
    assert named <= MISTAKES.keys() and {code for code in MISTAKES if code > "HS200"} <= named


def test_the_page_has_each_of_them() -> None:
    page = (ROOT / "docs/verdicts/loop.md").read_text(encoding="utf-8")
    assert all(f"`{mistake.code}`" in page and mistake.fix in page for mistake in MISTAKES.values())
