"""The lint for dead code finds nothing here, and finds what is seeded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.unused import EXCEPTIONS, findings


@pytest.mark.hours  # `make lint` runs it
def test_everything_is_used() -> None:
    assert findings() == []
    assert all(EXCEPTIONS.values())


def small(root: Path, **files: str) -> Path:
    """Write a package of two modules below `root`, and one test; `files` replaces or adds to their text."""
    texts = {
        "a": "__all__ = ['f']\ndef f():\n    return 1\n",
        "b": "from halfstep.a import f\nX = f()\nprint(X)\n",
        **files,
    }
    for name, text in texts.items():
        file = root / ("tests/test_a.py" if name == "test" else f"src/halfstep/{name}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"c": "def g():\n    return 1\n"}, "c.py:1 g is defined and used nowhere"),
        (
            {"c": "class C:\n    def method(self):\n        return 1\nC()\n"},
            "c.py:2 method is defined and used nowhere",
        ),
        ({"c": "LIMIT = 3\n"}, "c.py:1 LIMIT is defined and used nowhere"),
        (
            {"c": "def g():\n    return 1\n", "test": "from halfstep.c import g\ng()\n"},
            "c.py:1 g is used by tests alone",
        ),
        ({"c": "__all__ = ['g']\ndef g():\n    return 1\ng()\n"}, "c.py:1 g is in __all__ and no other file uses it"),
    ],
)
def test_it_finds(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    found = findings(small(tmp_path, **files), {})
    assert len(found) == 1 and found[0].endswith(complaint), found


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"c": "class C:\n    def method(self):\n        return 1\ngetattr(C(), 'method')\n"},
        {"c": "from .a import f as g\ng()\n"},
        {"compat/c": "__all__ = ['g']\ndef g():\n    return 1\ng()\n"},
    ],
)
def test_it_leaves_alone(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "src/halfstep/compat").mkdir(parents=True)
    assert findings(small(tmp_path, **files), {}) == []


def test_a_needless_exception_is_noticed(tmp_path: Path) -> None:
    assert findings(small(tmp_path), {"g": "forgotten"}) == [
        "tests/architecture/unused.py: the exception g is no longer needed"
    ]
