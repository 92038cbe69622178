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


def reading_lists() -> list[list[tuple[str, int, int]]]:
    """Return the two lists of files to read, as (file, lines, minutes)."""
    path = TEXT.partition("## The code in an hour")[2].partition("\n## ")[0]
    tables = path.split("| file | lines | minutes |")[1:]
    row = re.compile(r"^\| `(src/halfstep/[\w/]+\.py)` \| (\d+) \| (\d+) \|", re.MULTILINE)
    return [[(file, int(lines), int(minutes)) for file, lines, minutes in row.findall(table)] for table in tables]


def test_the_hour_path_is_complete_and_in_the_order_of_the_layers() -> None:
    first, second = reading_lists()
    assert len(first) == 14 and len(second) == 62
    assert len({file for file, _, _ in first + second}) == 76
    for rows in (first, second):
        layers = [LAYERS[Path(file).relative_to("src/halfstep").parts[0].removesuffix(".py")] for file, _, _ in rows]
        assert layers == sorted(layers)


def test_the_hour_path_takes_an_hour() -> None:
    for rows, most in zip(reading_lists(), (90, 240), strict=True):
        for file, lines, minutes in rows:
            real = len((ROOT / file).read_text(encoding="utf-8").splitlines())
            assert abs(lines - real) <= max(10, real / 4), f"{file} has {real} lines"
            assert minutes == max(1, round(lines / 45)), file
        total = sum(minutes for _, _, minutes in rows)
        assert 50 <= total <= most and f"{total} " in TEXT


def test_every_file_of_the_lens_is_in_one_of_its_readings() -> None:
    text = TEXT.partition("**The instruments**")[2].partition("\n## ")[0]
    files = sorted(path.stem for path in (ROOT / "src/halfstep/lens").rglob("*.py") if path.stem != "__init__")
    assert sorted(re.findall(r"`(\w+)`", text)) == files


def test_the_layers_it_draws_are_the_enforced_ones() -> None:
    lines = re.findall(r"^([0-5])   ([^#\n]*)", TEXT, re.MULTILINE)
    drawn = {word: int(layer) for layer, words in lines for word in words.split() if word != "->"}
    assert drawn == dict(LAYERS)
