"""Public names: those at the top are what users type; an old name works, and its warning names the new place."""

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


@pytest.mark.parametrize("name", sorted(hs.DEPRECATED))
def test_a_deprecated_name_works_and_names_its_new_place(name: str) -> None:
    place, removed_in = hs.DEPRECATED[name]
    part, new = place.split(".")
    package = import_module(f"halfstep.{part}")
    assert part in PUBLIC and new in package.__all__ and name not in hs.__all__
    with pytest.warns(DeprecationWarning, match=rf"hs\.{name} is deprecated.*{removed_in}: use hs\.{place}") as told:
        assert getattr(hs, name) is getattr(package, new)
    assert told[0].filename == __file__


def test_no_deprecated_name_outlives_its_version() -> None:
    this = tuple(map(int, hs.__version__.split(".")))
    assert [name for name, (_, end) in hs.DEPRECATED.items() if tuple(map(int, end.split("."))) <= this] == []
