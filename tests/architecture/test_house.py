"""The counts that the design of the package is held to: folders, READMEs, the training step, documents."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.imports import LAYERS
from tests.sources import tree_of

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "halfstep"
ROOMS = ("auto", "binding", "checkpoints", "step", "step/parts", "update")

MOST_FILES = 20  # of Python in one folder
MOST_LINES = 62_000  # of Python in the package
LINES, ATTRIBUTES, NONES = 300, 16, 15  # of TrainStep
README_LINES = 12


def class_of(file: Path, name: str) -> ast.ClassDef:
    tree = tree_of(file)
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def attributes(node: ast.AST) -> set[str]:
    """Return the attributes of ``self`` that are assigned."""
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return {one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id == "self"}


def nones(node: ast.AST) -> int:
    """Return how many comparisons have a None."""
    compared = [(one.left, *one.comparators) for one in ast.walk(node) if isinstance(one, ast.Compare)]
    return sum(any(isinstance(side, ast.Constant) and side.value is None for side in sides) for sides in compared)


def test_no_folder_is_too_full() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    full = {str(folder): count for folder in folders if (count := len([*folder.glob("*.py")])) > MOST_FILES}
    assert full == {}


def test_the_package_does_not_grow() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")) <= MOST_LINES


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_page_that_names_its_first_file(room: str) -> None:
    text = (SOURCE / room / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES and "First file: `" in text
    first = text.partition("First file: `")[2].partition("`")[0]
    assert (SOURCE / room / first).exists()
    assert room.partition("/")[0] in LAYERS


def test_a_training_step_is_small() -> None:
    step = class_of(SOURCE / "step" / "train_step.py", "TrainStep")
    assert step.end_lineno is not None and step.end_lineno - step.lineno < LINES
    assert nones(step) <= NONES
    every = attributes(step) | attributes(class_of(SOURCE / "step" / "settings.py", "Settings"))
    assert len(every) <= ATTRIBUTES, every


def test_the_counts_can_fail() -> None:
    node = ast.parse(
        "class A:\n    def f(self, x):\n        self.a = self.b = 1\n        return x is None or None == x"
    )
    assert attributes(node) == {"a", "b"} and nones(node) == 2
