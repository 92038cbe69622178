"""docs/tune.md: its snippets run, its table has every verdict, and the run that it shows reads back as a policy."""

from __future__ import annotations

import re
from pathlib import Path

import halfstep as hs
from halfstep.advise.tune import Tried
from tests.snippets import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tune.md"


def test_its_snippets_keep_their_promises() -> None:
    assert run_page(PAGE) == 4


def test_it_lists_every_verdict() -> None:
    described = (Tried.__doc__ or "").partition("        verdict: ")[2].partition("        reason: ")[0]
    table = PAGE.read_text(encoding="utf-8").partition("| verdict of a candidate |")[2].partition("##")[0]
    assert set(re.findall(r'"([a-z]+)"', described)) == set(re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE))


def test_the_run_that_it_shows_reads_back() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    policy = hs.Policy.from_toml(text)
    assert policy.name and "# chosen: " in text and "# machine: " in text
    assert f"# {policy.name}" in text
