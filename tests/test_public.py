"""Public names: those at the top are what users type."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import halfstep as hs
from tests.architecture.imports import PUBLIC

ROOT = Path(__file__).parent.parent


def test_every_name_at_the_top_is_used_in_readme_docs_or_examples() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    used = {name for file in files for name in re.findall(r"\bhs\.(\w+)", file.read_text(encoding="utf-8"))}
    assert set(hs.__all__) - used == set()


@pytest.mark.parametrize("part", sorted(PUBLIC))
def test_every_public_name_exists_and_is_listed_once(part: str) -> None:
    package = import_module(f"halfstep.{part}".rstrip("."))
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert len(set(package.__all__)) == len(package.__all__)
