"""The checker of torch's private names: which the package has, which files use others, which the installed torch lacks.

A name is private if a part of it has a leading underscore: a module (``torch._C``), a function (``_pop_mode``), an
attribute (``tensor._base``). It is read in syntax only: imports from torch, chains of attributes that begin at an
imported name, attributes that no code of halfstep defines, and texts that name one in getattr and its like.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import statements, tree_of

PACKAGE = "torch_private"

EVERYWHERE = frozenset({"_buffers", "_modules", "_parameters", "_version"})
"""Attributes that any file may read; `halfstep.torch_private` says why."""

OTHERS: Mapping[str, str] = {
    "_after_closure": "Lightning",
    "_amp_lazy_init": "Apex",
    "_amp_stash": "Apex",
    "_compiler_ctx": "Lightning",
    "_fields": "named tuples",
    "_forward_module": "Lightning",
    "_fwd_used_autocast": "of an autograd context: this package's own, beside torch's decorators",
    "_getframe": "sys",
    "_growth_tracker": "a key of GradScaler.state_dict",
    "_is_accelerate_prepared": "accelerate",
    "_lazy_init_maybe_master_weights": "Apex",
    "_master_params_to_model_params": "Apex",
    "_old_forward": "accelerate",
    "_original_forward": "accelerate",
    "_original_module": "Lightning",
    "_post_amp_backward": "Apex",
    "_prepare_amp_backward": "Apex",
    "_scale_grads_": "keys of a scaler's table, read in scripts",
    "_strategy": "Lightning",
    "_wrap_closure": "Lightning",
}
"""Private attributes that are not torch's -> whose they are."""

NAMED = ("getattr", "hasattr", "setattr", "delattr")


def private(name: str) -> bool:
    """Return whether a name has one leading underscore, more than underscores, and is not halfstep's mark."""
    return name.startswith("_") and not name.startswith(("__", "_halfstep")) and name.strip("_") != ""


def uses(root: Path) -> dict[str, list[str]]:
    """Return file -> "line name" of each private name of torch in it; files of the package are left out."""
    trees = {path.relative_to(root).as_posix(): _parsed(path) for path in sorted(root.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)}
    found = {file: sorted(set(_uses(tree, own))) for file, tree in trees.items() if not file.startswith(f"{PACKAGE}/")}
    return {file: [f"{line} {name}" for line, name in hits] for file, hits in found.items() if hits}


def dotted(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (file of the package, dotted private name) of each name that the package binds when it is imported."""
    for path in sorted((root / PACKAGE).glob("*.py")):
        tree = _parsed(path)
        aliases = _aliases(tree)
        names = {full for full in aliases.values() if any(map(private, full.split(".")))}
        names |= {name for node in ast.walk(tree) if any(map(private, (name := _full(node, aliases)).split(".")))}
        longest = (n for n in names if not any(other.startswith(f"{n}.") for other in names))
        yield from ((path.name, name) for name in sorted(longest))


def missing(name: str) -> str:
    """Return the first part of a dotted name that the installed torch lacks, "" if it has all."""
    words = name.split(".")
    found: object = importlib.import_module(words[0])
    for n, word in enumerate(words[1:], 2):
        here = ".".join(words[:n])
        try:
            found = getattr(found, word) if hasattr(found, word) else importlib.import_module(here)
        except ImportError:
            return here
    return ""


def _parsed(path: Path) -> ast.Module:
    return tree_of(path)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return name in a file -> dotted name in torch."""
    found = {}
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found.update(
                {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _is_torch(a.name)}
            )
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_torch(node.module or ""):
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def _is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _full(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """Return the dotted name of a chain of attributes that begins at a name of torch, "" for other nodes."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    base = _full(node.value, aliases) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def _named(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a file defines: functions, classes, arguments, variables, attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _named(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.Assign) and _named(node.targets[0]) == "__slots__":
            yield from (str(c.value) for c in ast.walk(node.value) if isinstance(c, ast.Constant))


def _uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_torch(node.module or ""):
            names = [f"{node.module}.{a.name}" for a in node.names]
            yield from ((node.lineno, name) for name in names if any(map(private, name.split("."))))
        elif isinstance(node, ast.Attribute) and private(node.attr):
            full = _full(node, aliases)
            if full or not (node.attr in own or node.attr in OTHERS or node.attr in EVERYWHERE):
                yield node.lineno, full or node.attr
        elif isinstance(node, ast.Call) and _named(node.func) in NAMED and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if private(str(name)) and name not in own and name not in OTHERS and name not in EVERYWHERE:
                yield node.lineno, str(name)
