"""CONTRIBUTING.md lists the files of the first hour and counts all other files of the core and the lens."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.imports import LAYERS
from tests.architecture.reading import (
    CONTRIBUTING,
    HOUR,
    HOUR_MINUTES,
    PARTS,
    SOURCE,
    contributing,
    minutes,
    others,
)
from tests.sources import tree_of


def test_the_lists_are_those_of_the_files() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert contributing(text) == text, "run `make tables`"
    assert "| `src/halfstep/policy/policy.py` |" in text and "| `step` |" in text


def test_the_first_hour_is_an_hour_in_the_order_of_the_layers() -> None:
    assert sum(minutes(SOURCE / file) for file, _ in HOUR) <= HOUR_MINUTES
    layers = [LAYERS[Path(file).parts[0].removesuffix(".py")] for file, _ in HOUR]
    assert layers == sorted(layers)


def test_every_file_of_the_core_and_the_lens_is_counted_and_says_what_it_is_for() -> None:
    counted = {SOURCE / file for file, _ in HOUR} | {file for part in PARTS for file in others(part)}
    core = {"cast", "events", "errors", "formats", "kernels", "lens", "policy", "scale", "step", "trees"}
    core |= {"weights"}
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path.stem != "__init__"]
    wanted = [path for path in files if path.relative_to(SOURCE).parts[0].removesuffix(".py") in core]
    assert len(wanted) > 100 and set(wanted) <= counted
    assert [p for p in wanted if not ast.get_docstring(tree_of(p))] == []


def test_minutes_are_those_of_the_lines_and_a_file_that_only_exports_is_left_out(tmp_path: Path) -> None:
    part = tmp_path / "scale"
    part.mkdir()
    (part / "__init__.py").write_text('"""Scales."""\n\nfrom halfstep.scale.x import f\n\n__all__ = ["f"]\n')
    (part / "x.py").write_text('"""What a scale is."""\n\ndef f():\n' + "    pass\n" * 88)
    (file,) = others("scale", tmp_path)
    assert file == part / "x.py" and minutes(file) == 2
