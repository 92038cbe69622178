"""The reading list of CONTRIBUTING.md and the count of the other files; ``make tables`` writes both.

    python -m tests.architecture.reading [--check]

A file takes a minute for 45 of its lines, docstrings and blank lines included. `HOUR` is the list, in the order to
read.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.markdown import fill, table
from tests.architecture.imports import LAYERS
from tests.sources import tree_of

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "halfstep"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
LINES_A_MINUTE = 45

HOUR: Sequence[tuple[str, str]] = (
    ("policy/policy.py", "every field of a `Policy`, and how each is checked"),
    ("cast/state.py", "what is stored for each thread: its regions, and the low copies in them"),
    ("cast/regions/opening.py", "how a region is entered and left"),
    ("cast/rules/dispatch.py", "how an operator finds its handler, and its arguments their format"),
    ("cast/rules/handlers.py", "what a rule does with one operator"),
    ("update/updater.py", "how gradients become new weights"),
    ("step/part.py", "what a part of a step is, and its moments"),
    ("step/moments.py", "which parts take part in a step, when each is called, and what an exception leaves"),
    ("step/train_step.py", "one training step: where casting, scaling and weights meet"),
)
"""File -> what a reader knows afterwards, in the order to read."""

HOUR_MINUTES = 60
"""The most minutes that the files of `HOUR` may take."""

PARTS = sorted((name for name, layer in LAYERS.items() if layer <= 5 or name == "lens"), key=lambda name: LAYERS[name])
"""The parts of the core, and the lens, from the lowest layer up."""


def minutes(file: Path) -> int:
    """Return how long it takes to read a file."""
    return max(1, round(len(file.read_text(encoding="utf-8").splitlines()) / LINES_A_MINUTE))


def others(part: str, source: Path = SOURCE) -> list[Path]:
    """Return the files of `part` that are not on the list and define something."""
    path = source / part
    listed = {source / file for file, _ in HOUR}
    files = sorted(path.rglob("*.py")) if path.is_dir() else sorted(source.glob(f"{part}.py"))
    return [file for file in files if file not in listed and _defines(file)]


def _defines(file: Path) -> bool:
    body = tree_of(file).body
    exports = () if file.name != "__init__.py" else (ast.Assign,)  # ``__all__`` alone defines nothing
    return any(
        isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)) and not isinstance(node, exports)
        for node in body
    )


def contributing(text: str) -> str:
    """Return CONTRIBUTING.md with its two tables made again."""
    listed = [[f"`src/halfstep/{file}`", str(minutes(SOURCE / file)), purpose] for file, purpose in HOUR]
    total = ["**together**", f"**{sum(minutes(SOURCE / file) for file, _ in HOUR)}**", ""]
    parts = [(part, others(part)) for part in PARTS]
    summary = [[f"`{part}`", str(len(files)), str(sum(map(minutes, files)))] for part, files in parts if files]
    made = {
        "reading hour": table(["file", "minutes", "what you know afterwards"], [*listed, total]),
        "reading rest": table(["part", "files", "minutes"], summary),
    }
    return fill(text, made)


def write(made: Mapping[Path, str]) -> None:
    """Write files made by a script or, with --check, fail where one is not as it would be written."""
    for path, text in made.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is not up to date: run `make tables`")


if __name__ == "__main__":
    write({CONTRIBUTING: contributing(CONTRIBUTING.read_text(encoding="utf-8"))})
