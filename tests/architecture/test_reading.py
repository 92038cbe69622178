"""CONTRIBUTING.md lists the files of the first hour, docs/reading.md all other files of the core and the lens."""

from __future__ import annotations

from pathlib import Path

from tests.architecture.imports import LAYERS
from tests.architecture.reading import CONTRIBUTING, HOUR, HOUR_MINUTES, PAGE, SOURCE, contributing, hour, others, page


def test_the_lists_are_those_of_the_files() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert contributing(text) == text, "run `make tables`"
    assert page() == PAGE.read_text(encoding="utf-8"), "run `make tables`"
    assert "| `src/halfstep/policy/policy.py` |" in text and "| `step` |" in text


def test_the_first_hour_is_an_hour_in_the_order_of_the_layers() -> None:
    assert sum(row.minutes for row in hour()) <= HOUR_MINUTES
    layers = [LAYERS[Path(file).parts[0].removesuffix(".py")] for file, _ in HOUR]
    assert layers == sorted(layers)


def test_every_file_of_the_core_and_the_lens_is_on_a_list() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = {file for file, _ in HOUR}
    core = {"cast", "events", "errors", "formats", "kernels", "lens", "policy", "scale", "step", "trees"}
    core |= {"weights"}
    files = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py"))]
    wanted = [
        path.as_posix() for path in files if path.parts[0].removesuffix(".py") in core and path.stem != "__init__"
    ]
    assert len(wanted) > 100 and [name for name in wanted if name not in first and f"| `{name}` |" not in text] == []


def test_minutes_and_purpose_are_read_from_the_file(tmp_path: Path) -> None:
    part = tmp_path / "scale"
    part.mkdir()
    (part / "__init__.py").write_text('"""Scales."""\n\nfrom halfstep.scale.x import f\n\n__all__ = ["f"]\n')
    (part / "x.py").write_text('"""What\na scale is.\n\nMore."""\n\ndef f():\n' + "    pass\n" * 85)
    (row,) = others("scale", tmp_path)
    assert (row.file, row.lines, row.minutes, row.purpose) == ("scale/x.py", 91, 2, "What a scale is")
