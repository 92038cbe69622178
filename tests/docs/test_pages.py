"""The pages for users that have no test file of their own: snippets run and give what they state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfstep.compat.apex.amp.handle import close_casts
from tests.snippets import FRAGMENT, programs, run_page, run_programs, snippets

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
ALONE = [ROOT / "README.md", DOCS / "index.md", DOCS / "start.md", *sorted(DOCS.glob("howto/*.md"))]
"""Pages of which each block can be pasted into a script."""
ORDERED = ("troubleshooting", "faq", "limits", "platforms", "versioning", "security", "compare", "upstream")


@pytest.fixture(autouse=True)
def casts_end(clean_start: None) -> Iterator[None]:
    """Close the casts of Apex's O1, which are the process's from `amp.initialize` on."""
    yield
    close_casts()


@pytest.mark.parametrize("name", [name for name in ORDERED if snippets(DOCS / f"{name}.md")])
def test_snippets_run_in_order_and_keep_their_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_page(DOCS / f"{name}.md")


@pytest.mark.parametrize("page", [page for page in ALONE[1:] if snippets(page)], ids=lambda page: page.stem)
def test_programs_run_and_keep_their_promises(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_programs(page)


def test_each_program_is_a_script_of_its_own() -> None:
    command = [sys.executable, "-W", "error", "-W", "ignore:policy:UserWarning", "-m", "tests.snippets"]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    run = subprocess.run([*command, *map(str, ALONE)], cwd=ROOT, env=found, capture_output=True, text=True, check=False)
    assert not run.returncode, run.stdout + run.stderr
    assert sum(len(programs(page)) for page in ALONE) > 25 and run.stdout.count(": ok") == len(ALONE)


def test_a_block_that_is_no_program_says_what_a_reader_has_to_add() -> None:
    firsts = [first for page in ALONE for first in FRAGMENT.findall(page.read_text(encoding="utf-8"))]
    assert firsts and all(first.startswith("# a fragment: ") for first in firsts)
