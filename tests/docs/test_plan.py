"""docs/plan.md: its snippets run and give what stands beside them; its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from halfstep.advise.plan import PARTS, gpu_named, gpu_names
from tests.snippets import run_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plan.md"


def test_its_snippets_keep_their_promises() -> None:
    assert run_page(PAGE) >= 3


def test_it_lists_every_part_and_every_gpu() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parts = text.partition("## What the parts are")[2].partition("##")[0]
    assert tuple(re.findall(r"^\| ([a-z ]+) \|", parts, re.M)[1:]) == PARTS
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \| ([\d.]+) \| (.+) \|$", text, re.M)
    cards = map(gpu_named, gpu_names())
    assert rows == [(card.name, card.title, f"{card.total:g}", ", ".join(card.formats)) for card in cards]
