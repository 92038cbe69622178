"""The reading lists of CONTRIBUTING.md and docs/reading.md, made from the files; ``make tables`` writes them.

    python -m tests.architecture.reading [--check]

A file takes a minute for 45 of its lines, docstrings and blank lines included. `HOUR` is the first list, in the order
to read; every other file of the core and of the lens is on the second, with the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.markdown import fill, table
from tests.architecture.imports import LAYERS

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "halfstep"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGE = ROOT / "docs" / "reading.md"
LINES_A_MINUTE = 45

HOUR: Sequence[tuple[str, str]] = (
    ("policy/policy.py", "every field of a `Policy`, and how each is checked"),
    ("policy/presets.py", "the presets: values of `Policy`"),
    ("cast/state.py", "what is stored for each thread: its regions, and the low copies in them"),
    ("cast/regions/opening.py", "how a region is entered and left"),
    ("cast/rules/dispatch.py", "how an operator finds its handler, and its arguments their format"),
    ("cast/rules/handlers.py", "what a rule does with one operator"),
    ("step/moments.py", "which parts take part in a step, when each is called, and what an exception leaves"),
    ("step/train_step.py", "one training step: where casting, scaling and weights meet"),
    ("update/updater.py", "how gradients become new weights"),
)
"""File -> what a reader knows afterwards, in the order to read."""

HOUR_MINUTES = 60
"""The most minutes that the files of `HOUR` may take."""

PARTS = sorted((name for name, layer in LAYERS.items() if layer <= 3 or name == "lens"), key=lambda name: LAYERS[name])
"""The parts of the core, and the lens, from the lowest layer up."""


@dataclass(frozen=True)
class Row:
    """One file: its path below src/halfstep, its lines, what it is for."""

    file: str
    lines: int
    purpose: str

    @property
    def minutes(self) -> int:
        """How long it takes to read."""
        return max(1, round(self.lines / LINES_A_MINUTE))


def row(path: Path, source: Path, purpose: str = "") -> Row:
    """Return the row of a file; without a purpose, that of the first sentence of its docstring."""
    text = path.read_text(encoding="utf-8")
    doc = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return Row(path.relative_to(source).as_posix(), len(text.splitlines()), purpose or doc.removesuffix("."))


def hour(source: Path = SOURCE) -> list[Row]:
    """Return the rows of the first list."""
    return [row(source / file, source, purpose) for file, purpose in HOUR]


def others(part: str, source: Path = SOURCE) -> Iterator[Row]:
    """Yield the rows of the second list that are files of `part`; files without a definition are left out."""
    path = source / part
    first = {file for file, _ in HOUR}
    for file in sorted(path.rglob("*.py")) if path.is_dir() else sorted(source.glob(f"{part}.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        defines = any(isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)) for n in tree.body)
        exports = all(isinstance(n, (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)) for n in tree.body)
        if (
            defines
            and not (file.name == "__init__.py" and exports)
            and file.relative_to(source).as_posix() not in first
        ):
            yield row(file, source)


def contributing(text: str) -> str:
    """Return CONTRIBUTING.md with its two tables made again."""
    first = hour()
    listed = [[f"`src/halfstep/{r.file}`", str(r.minutes), r.purpose] for r in first]
    total = ["**together**", f"**{sum(r.minutes for r in first)}**", ""]
    parts = [(part, list(others(part))) for part in PARTS]
    summary = [[f"`{p}`", str(len(rows)), str(sum(r.minutes for r in rows))] for p, rows in parts if rows]
    made = {
        "reading hour": table(["file", "minutes", "what you know afterwards"], [*listed, total]),
        "reading rest": table(["part", "files", "minutes"], summary),
    }
    return fill(text, made)


def page() -> str:
    """Return docs/reading.md."""
    lines = [
        "# What each file is for",
        "",
        "The files of the core and of the lens, from the lowest layer up, without those of the first hour in",
        "[CONTRIBUTING.md](../CONTRIBUTING.md). Made by `make tables` from the first sentence of each file.",
    ]
    for part in PARTS:
        if rows := list(others(part)):
            lines += ["", f"## {part}: {sum(r.minutes for r in rows)} minutes", ""]
            lines.append(
                table(["file", "minutes", "what it is for"], [[f"`{r.file}`", str(r.minutes), r.purpose] for r in rows])
            )
    return "\n".join(lines) + "\n"


def write(made: Mapping[Path, str]) -> None:
    """Write files made by a script or, with --check, fail where one is not as it would be written."""
    for path, text in made.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is not up to date: run `make tables`")


if __name__ == "__main__":
    write({CONTRIBUTING: contributing(CONTRIBUTING.read_text(encoding="utf-8")), PAGE: page()})
