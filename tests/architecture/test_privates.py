"""No part reads a private name of another part."""

from __future__ import annotations

from pathlib import Path

import pytest

import halfstep
from tests.architecture.privates import EXCEPTIONS, used_exceptions, violations

ROOT = Path(halfstep.__file__).parent


def test_private_names_stay_in_their_part() -> None:
    assert violations(ROOT) == [] and used_exceptions(ROOT) == set(EXCEPTIONS)


STEP = """
class Step:
    def __init__(self):
        self._memory = []
    def _run(self):
        pass
    def open(self):
        pass
def _help():
    pass
"""


def package(root: Path, place: str, text: str) -> Path:
    """Write a package: `STEP` in step/train.py, `text` in another file."""
    for name, content in (("step/train.py", STEP), (place, text)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    return root


IMPORT = "from halfstep.step.train import Step\n"


@pytest.mark.parametrize("place", ["lens/box/x.py", "step/parts/x.py", "cli/x.py", "optim.py"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def f(step):\n    return step._memory\n", 2),
        ("def f(step):\n    step._memory = []\n", 2),
        ("def f(step):\n    return getattr(step, '_memory')\n", 2),
        ("from halfstep.step.train import _help\n", 1),
        ("import halfstep.step.train as train\ntrain._help()\n", 2),
        (IMPORT + "class Box(Step):\n    def look(self):\n        return self._memory\n", 4),
        (IMPORT + "class Box(Step):\n    def _run(self):\n        pass\n", 3),
    ],
)
def test_the_checker_catches(tmp_path: Path, place: str, text: str, line: int) -> None:
    found = violations(package(tmp_path, place, text), {})
    module = "halfstep." + place.removesuffix(".py").replace("/", ".")
    assert {item.partition(" ")[0] for item in found} == {f"{module}:{line}"}
    assert all(item.endswith("a private name of step") for item in found)


@pytest.mark.parametrize(
    "text",
    [
        "def f(step: Step):\n    return step._memory\n",
        "def f(step: Step | None = None):\n    return step._memory\n",
        "def f():\n    step = Step()\n    return step._memory\n",
        "class B:\n    step: Step\n    def f(self):\n        return self.step._memory\n",
        "class B:\n    def __init__(self, step: Step):\n        self.step, self.n = step, 1\n"
        "    def f(self):\n        step = self.step\n        return step._memory\n",
        "class B:\n    @property\n    def s(self) -> Step: ...\n    def f(self):\n        return self.s._memory\n",
    ],
)
def test_it_catches_by_the_class_where_both_parts_define_the_name(tmp_path: Path, text: str) -> None:
    own = "class Own:\n    def __init__(self):\n        self._memory = 1\n"
    found = violations(package(tmp_path, "lens/x.py", IMPORT + own + text), {})
    assert len(found) == 1 and "reads _memory, a private name of step" in found[0], found


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("step/x.py", "def f(step):\n    return step._memory\n"),
        ("lens/x.py", "def f(tensor):\n    return tensor._grad\n"),
        ("lens/x.py", "class A:\n    def f(self, other):\n        self._memory = other._memory\n"),
        ("lens/x.py", IMPORT + "class A(Step):\n    def f(self):\n        self.open()\n"),
        ("lens/x.py", "def f(step):\n    return step.__dict__\n"),
    ],
)
def test_the_checker_allows(tmp_path: Path, place: str, text: str) -> None:
    assert violations(package(tmp_path, place, text), {}) == []


def test_a_needless_exception_is_noticed(tmp_path: Path) -> None:
    root = package(tmp_path, "lens/x.py", "def f(step):\n    return step._memory\n")
    used, unused = ("halfstep.lens.x", "_memory"), ("halfstep.lens.x", "_run")
    table = {used: "on purpose", unused: "forgotten"}
    assert violations(root, table) == []
    assert used_exceptions(root, table) == {used}
