"""CONTRIBUTING.md speaks of files and make targets that exist, and of the layers that the checker enforces."""

from __future__ import annotations

import re
from pathlib import Path

from tests.architecture.imports import LAYERS

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_file_it_names_exists() -> None:
    named = {p.rstrip("/") for p in re.findall(r"\b(?:src|tests|docs|benchmarks)/[\w./-]+", TEXT)}
    written = {n for n in named if not n.startswith("benchmarks/results") and "NAME" not in n}
    assert len(written) > 15
    assert [n for n in sorted(written) if not (ROOT / n).exists()] == []


def test_every_make_target_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word for line in re.findall(r"^make ([a-z -]+)", TEXT, re.MULTILINE) for word in line.split()}
    assert {"lint", "test", "bench"} <= named <= targets


def test_the_layers_it_draws_are_the_enforced_ones() -> None:
    lines = re.findall(r"^([0-7])   ([^#\n]*)", TEXT, re.MULTILINE)
    drawn = {word: int(layer) for layer, words in lines for word in words.split() if word != "->"}
    assert drawn == dict(LAYERS)
