"""The checker of private names: no part reads a name with a leading underscore that another part defines.

A part is a file or folder directly below ``src/halfstep``; the folders of `SPLIT` are several parts. The checker reads
syntax only. It reports an access in one part

- if the name is defined in other parts only (names that no part defines are torch's, and allowed),
- if the receiver is an argument, a variable or a field that is annotated with, or made by, a class of another part, or
- if a class uses or overrides a private name of its base class, which is of another part.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tests.sources import statements, tree_of

PACKAGE = "halfstep"
SPLIT = ("lens", "step")
"""Folders whose own folders are parts, too: `step.parts` and `step` are two."""

TORCHS: Mapping[str, str] = {
    "_buffers": "torch.nn.Module",
    "_modules": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_spec": "torch.distributed.tensor.DTensor",
    "_step_supports_amp_scaling": "torch.optim.Optimizer",
    "_values": "torch.Tensor, of a sparse one",
    "_version": "torch.Tensor",
}
"""Private name of torch -> its class; a part that defines the same name does not own it."""

EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("halfstep.compat.torch_amp.autocast_mode", "_dtype"): "an attribute of torch.autocast's custom_fwd functions",
    ("halfstep.auto.trial", "_compiled"): "compiled code is handed from one step on trial to the next",
}
"""(module, private name) -> why this module may read it."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


@dataclass(eq=False)
class Source:
    """One file: its tree, its part, and the classes of this package that it defines or imports."""

    module: str
    part: str
    package: bool
    tree: ast.Module
    classes: dict[str, Class] = field(default_factory=dict)


@dataclass(frozen=True)
class Class:
    """A class of the package: its part, its private names."""

    part: str
    names: frozenset[str]


def part_of(module: str) -> str:
    """Return the part to which a module belongs."""
    words = module.split(".")[1:]
    return ".".join(words[: 1 + (words[0] in SPLIT and len(words) > 2)]) if words else ""


def read(root: Path) -> list[Source]:
    """Return every file below `root`, the folder of the package."""
    sources = []
    for path in sorted(root.rglob("*.py")):
        words = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        package = words[-1] == "__init__"
        part = part_of(f"{name}.x" if package else name)
        sources.append(Source(name, part, package, tree_of(path)))
    homes = {
        (source.module, node.name): Class(source.part, frozenset(_defined(node)))
        for source in sources
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    }
    for _ in range(3):  # a name may come through as many packages that re-export it
        for source in sources:
            for base, name, alias, _ in _imports(source, source.package):
                if (base, name) in homes:
                    homes.setdefault((source.module, alias), homes[base, name])
    for source in sources:
        source.classes = {name: found for (module, name), found in homes.items() if module == source.module}
    return sources


@cache
def reads(root: Path) -> list[tuple[str, int, str, str]]:
    """Return (module, line, name, its part) of each access to a private name of another part below `root`."""
    sources = read(root)
    owners = defaultdict(set)
    for source in sources:
        for name in _defined(source.tree):
            owners[name].add(source.part)
    found = []
    for source in sources:
        for line, name, receiver in sorted(_accesses(source)):
            if name in TORCHS or name not in owners:
                continue
            if source.part not in owners[name] or receiver not in ("", source.part):
                found.append((source.module, line, name, receiver or " or ".join(sorted(owners[name]))))
    return found


def violations(root: Path, exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS) -> list[str]:
    """Return each access to a private name of another part below `root`, one line each."""
    return [
        f"{module}:{line} reads {name}, a private name of {owner}"
        for module, line, name, owner in reads(root)
        if (module, name) not in exceptions
    ]


def used_exceptions(root: Path, exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS) -> set[tuple[str, str]]:
    """Return the exceptions without which `violations` would find something."""
    return set(exceptions) & {(module, name) for module, _, name, _ in reads(root)}


def private(name: str) -> bool:
    """Return whether a name is private: one leading underscore, and more than underscores."""
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def _defined(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the private names that a file or class defines: functions, classes, variables, slots, fields."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names = [node.attr]
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for target, value in (pair for statement in node.body for pair in _assigned(statement)):
                names += [target.id] if isinstance(target, ast.Name) else []
                if names[-1:] == ["__slots__"] and value is not None:
                    names += [str(n.value) for n in ast.walk(value) if isinstance(n, ast.Constant)]
        yield from filter(private, names)


@cache
def _imports(source: Source, package: bool) -> list[tuple[str, str, str, int]]:
    """Return (module, name, name here, line) of every ``from module import name``."""
    found = []
    for node in statements(source.tree):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = source.module.split(".")
                above = here[: len(here) - (node.level - package)]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found += [(base, alias.name, alias.asname or alias.name, node.lineno) for alias in node.names]
    return found


def _accesses(source: Source) -> Iterator[tuple[int, str, str]]:
    """Yield (line, private name, part of the receiver's class or "") of every access but those to ``self``."""
    for base, name, _, line in _imports(source, source.package):
        if private(name) and base.startswith(PACKAGE):
            yield line, name, part_of(base)
    yield from _walk(source.tree, Seen(source.classes))
    for node in (found for found in statements(source.tree) if isinstance(found, ast.ClassDef)):
        for above in (source.classes.get(parent.id) for parent in node.bases if isinstance(parent, ast.Name)):
            if above is not None and above.part != source.part:
                yield from ((line, name, above.part) for line, name in _of_self(node) if name in above.names)


@dataclass(frozen=True)
class Seen:
    """Which names stand for objects of which part, as far as syntax shows it."""

    classes: Mapping[str, Class]
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    def made(self, node: ast.expr | None) -> str:
        """Return the part of the class that an annotation or a callee names, "" for none; `X | None` counts as X."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return self.made(node.left) or self.made(node.right)
        return self.classes[node.id].part if isinstance(node, ast.Name) and node.id in self.classes else ""

    def part(self, node: ast.expr | None) -> str:
        """Return the part of the class of an expression's value, "" where syntax does not show it."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            return self.fields.get(node.attr, "")
        return self.made(node.func) if isinstance(node, ast.Call) else ""

    def inside(self, function: Function) -> Seen:
        """Return what is seen in a function: also its arguments and its variables."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = {**self.names, **{a.arg: self.made(a.annotation) for a in arguments}}
        for statement in statements(function):
            for target, value in _assigned(statement):
                if isinstance(target, ast.Name) and (part := self._stored(statement, value)):
                    names[target.id] = part
        return replace(self, names=names)

    def within(self, node: ast.ClassDef) -> Seen:
        """Return what is seen in a class: also its fields and its properties."""
        fields: dict[str, str] = {}
        for statement in node.body:
            for target, _ in _assigned(statement):
                if isinstance(target, ast.Name) and isinstance(statement, ast.AnnAssign):
                    fields[target.id] = self.made(statement.annotation)
            if isinstance(statement, FUNCTIONS):
                fields[statement.name] = self.made(statement.returns) if statement.decorator_list else ""
                seen = self.inside(statement)
                for inner in statements(statement):
                    for target, value in _assigned(inner):
                        if isinstance(target, ast.Attribute) and _is_self(target.value):
                            fields[target.attr] = seen._stored(inner, value) or fields.get(target.attr, "")
        return replace(self, fields=fields)

    def _stored(self, statement: ast.AST, value: ast.expr | None) -> str:
        annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
        return self.made(annotation) or self.part(value)


def _walk(node: ast.AST, seen: Seen) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.ClassDef):
        seen = seen.within(node)
    elif isinstance(node, FUNCTIONS):
        seen = seen.inside(node)
    elif isinstance(node, ast.Attribute) and private(node.attr) and not _is_self(node.value):
        yield node.lineno, node.attr, seen.part(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        word = node.args[1] if len(node.args) > 1 else None
        if isinstance(word, ast.Constant) and isinstance(word.value, str) and private(word.value):
            if not _is_self(node.args[0]):
                yield node.lineno, word.value, seen.part(node.args[0])
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, seen)


def _of_self(tree: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the attributes of ``self`` and ``super()`` that a class uses, and of its methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            called = node.value.func if isinstance(node.value, ast.Call) else None
            if _is_self(node.value) or (isinstance(called, ast.Name) and called.id == "super"):
                yield node.lineno, node.attr
        elif isinstance(node, FUNCTIONS):
            yield node.lineno, node.name


def _assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return (target, value) of an assignment statement, nothing for another node."""
    if isinstance(node, ast.AnnAssign):
        return [(node.target, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    pairs: list[tuple[ast.expr, ast.expr | None]] = []
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += zip(target.elts, node.value.elts, strict=False)
        else:
            pairs.append((target, node.value))
    return pairs


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
