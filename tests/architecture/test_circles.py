"""No file imports one that imports it, and an import stands inside a function for a listed reason only."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfstep
from tests.architecture.circles import LATE, circles, late

ROOT = Path(halfstep.__file__).parent


def test_there_is_no_circle() -> None:
    assert circles(ROOT) == []


def test_late_imports_are_listed() -> None:
    found = late(ROOT)
    assert {key: lines for key, lines in found.items() if key not in LATE} == {}
    assert [key for key in LATE if key not in found] == []


def test_each_has_a_reason() -> None:
    kinds = ("start", "optional library", "builds of torch")
    assert [key for key, reason in LATE.items() if not reason.startswith(kinds)] == []


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("from halfstep.p.b import y", "from halfstep.p.a import x", [["p.a", "p.b"]]),
        ("from halfstep.p.b import y", "def f():\n    from halfstep.p.a import x", [["p.a", "p.b"]]),
        ("from halfstep.p.b import y", "def f():\n    import halfstep.p.a", [["p.a", "p.b"]]),
        ("from .b import y", "from . import a", [["p.a", "p.b"]]),
        ("from halfstep.p.b import y", "if TYPE_CHECKING:\n    from halfstep.p.a import x", []),
        ("from halfstep.p.b import y", "import torch", []),
    ],
)
def test_the_checker_catches(tmp_path: Path, a: str, b: str, found: list[list[str]]) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_text(a + "\n")
    (tmp_path / "p" / "b.py").write_text(b + "\n")
    assert circles(tmp_path) == found


def test_a_late_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import re\ndef f():\n    import torch.fx\n    from halfstep.step.b import x\n")
    assert late(tmp_path) == {("a", "torch"): [3], ("a", "halfstep.step"): [4]}
