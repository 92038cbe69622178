"""The checker of import circles: the graph of all imports between files, those inside functions included.

An import inside a function hides a circle from Python and not from a reader. Late imports are therefore listed, each
with its reason: an optional library, or the time that a program takes to start. Imports under ``if TYPE_CHECKING`` are
left out: they name types and run no code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.sources import BLOCKS, tree_of

PACKAGE = "halfstep"

COMPLETION = "start: the shell waits for a completion at each key"
FSDP = "start, and builds of torch without distributed: torch.distributed.fsdp"
PAGE = "start: a program that writes no page needs no jinja2"
SHARDS = "start: torch.distributed.checkpoint takes half a second"
STORES = "builds of torch without distributed"
TRACED = "start: a script is read without torch, which only a traced task needs"
TASKS = "optional library: the extra halfstep[tasks]"

LATE: Mapping[tuple[str, str], str] = {
    ("advise.lint.run", "halfstep.advise"): TRACED,
    (
        "advise.plan.ledger",
        "torch",
    ): "start, and builds of torch without distributed: a process group without processes",
    ("binding.shard", "torch"): FSDP,
    ("checkpoints.save", "halfstep.checkpoints"): SHARDS,
    ("cli", "halfstep.advise"): "start: files are checked without typer and rich",
    ("cli", "halfstep.cli"): "start: files are checked without typer and rich",
    ("cli.lint", "halfstep.tasks"): TRACED,
    ("cli.options", "halfstep.tasks"): COMPLETION,
    ("cli.shim.sitecustomize", "halfstep.cli"): "start: every Python of a process tree runs this file",
    ("integrations.timm", "timm"): "optional library: of adaptive clipping alone",
    ("kernels.sharded", "torch"): "start: torch.distributed.tensor, which a model without DTensors does not need",
    ("binding.fsdp", "torch"): FSDP,
    ("lens.monitor.records", "torch"): "optional library: tensorboard",
    ("meeting", "torch"): STORES,
    ("report.files", "jinja2"): PAGE,
    ("report.files", "markupsafe"): PAGE,
    ("step.parts.verdicts", "halfstep.lens"): "start: a step without a black box needs nothing of lens",
    ("tasks.gpt", "pydoc_data"): "start: 700 kB of text, for one task",
    ("tasks.images", "mlxtend"): TASKS,
    ("tasks.images", "numpy"): TASKS,
    ("tasks.images", "sklearn"): TASKS,
    ("torch_private.compiler", "torch"): "start: torch's compiler takes seconds",
}
"""(file that imports inside a function, package or part it imports) -> the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One import of one file.

    Attributes:
        module: the file, without the package's name.
        target: what it imports, with the package's name: a file of this package, or another one's module.
        line: where.
        late: whether it is inside a function.
    """

    module: str
    target: str
    line: int
    late: bool


@cache
def imports(root: Path) -> tuple[Import, ...]:
    """Return all imports of all files below `root`, the folder of the package, but for those of types alone."""
    files = {_name(path, root): path for path in sorted(root.rglob("*.py"))}
    return tuple(found for name, path in files.items() for found in _imports(name, path, frozenset(files)))


def circles(root: Path) -> list[list[str]]:
    """Return the circles: groups of files in which each imports each other, by whatever way."""
    names = {found.module for found in imports(root)}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for found in imports(root):
        target = found.target.removeprefix(f"{PACKAGE}.")
        if found.target.startswith(f"{PACKAGE}.") and target in names and target != found.module:
            graph[found.module].add(target)
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset({name, *(b for b in reached[name] if name in reached[b])}) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def late(root: Path) -> dict[tuple[str, str], list[int]]:
    """Return (file, package or part that it imports inside a function) -> lines."""
    found: dict[tuple[str, str], list[int]] = {}
    for each in imports(root):
        if each.late:
            words = each.target.split(".")
            found.setdefault((each.module, ".".join(words[: 1 + (words[0] == PACKAGE)])), []).append(each.line)
    return found


def _name(path: Path, root: Path) -> str:
    words = path.relative_to(root).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def _imports(name: str, path: Path, files: frozenset[str]) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, inside in _statements(tree_of(path), late=False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                above = f"{PACKAGE}.{package}".split(".")
                base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
            below = base.removeprefix(PACKAGE).strip(".")
            targets = [
                f"{base}.{a.name}" if f"{below}.{a.name}".strip(".") in files and base.startswith(PACKAGE) else base
                for a in node.names
            ]
        yield from (Import(module=name, target=t, line=node.lineno, late=inside) for t in dict.fromkeys(targets))


def _statements(node: ast.AST, *, late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, BLOCKS):  # no import is in an expression
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, late
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _statements(other, late=late)
        else:
            inside = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _statements(child, late=inside)
