"""The page on compiled and captured steps keeps its promises."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from halfstep.step.graphs import KINDS, WARM_UPS
from tests.snippets import run_page

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "capture.md"


def test_snippets_run_and_keep_their_promises() -> None:
    torch._dynamo.reset()
    assert run_page(PAGE) == 2
    torch._dynamo.reset()


def test_numbers_and_files_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert (WARM_UPS, KINDS) == (3, 8) and "first three calls" in text and "Eight kinds" in text
    for path in re.findall(r"`((?:src|tests)/[\w/]+\.py)`", text):
        assert (ROOT / path).is_file(), path
