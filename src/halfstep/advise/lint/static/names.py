"""Names: a script's syntax tree, and what its names stand for. Nothing is imported or run.

A name is resolved through the file's imports (``F.relu`` -> ``torch.nn.functional.relu``) or through what the file
assigns to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from halfstep.errors import LintError

__all__ = ["Function", "Names", "Value", "calls_in", "walked"]

NamesT = TypeVar("NamesT", bound="Names")
Body = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef

FORMATS = {
    "torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32",
    "torch.float": "fp32", "torch.float64": "fp64", "torch.double": "fp64",
}  # fmt: skip
"""torch's names of formats -> this package's."""


@lru_cache(maxsize=16384)
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return a node and all nodes below it; rules walk through the same ones again and again."""
    return tuple(ast.walk(node))


@dataclass(frozen=True, eq=False)
class Function:
    """A function, a method, or the top level of a file.

    Attributes:
        name: its name; "" for the top level.
        node: its definition.
        owner: name of the class of a method, else "".
    """

    name: str
    node: Body
    owner: str = ""

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements."""
        return self.node.body

    @property
    def arguments(self) -> list[ast.arg]:
        """Its arguments, in their order; none for the top level."""
        if isinstance(self.node, ast.Module):
            return []
        every = self.node.args
        return [*every.posonlyargs, *every.args, *every.kwonlyargs]


@dataclass(frozen=True, eq=False)
class Value:
    """What is assigned to a name: an expression, or the part `index` of one that is unpacked."""

    node: ast.expr
    index: int | None = None


class Names:
    """One Python file.

    Attributes:
        tree: its syntax tree.
        text: its source.
    """

    def __init__(self, text: str, path: str = "<script>") -> None:
        """Parse `text`.

        Raises:
            LintError: it is no Python of this version.
        """
        self.text = text
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise LintError(f"{path}{line} cannot be parsed: {reason}") from error

    @classmethod
    def read(cls: type[NamesT], path: Path) -> NamesT:
        """Return the script in a file.

        Raises:
            LintError: it cannot be read, or is no Python of this version.
        """
        try:
            return cls(path.read_text(encoding="utf-8-sig"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise LintError(f"file {str(path)!r} cannot be read: {error}") from error

    # ------------------------------------------------------------------ names

    @cached_property
    def imports(self) -> dict[str, str]:
        """Name in the file -> the module or object it was imported as; the first import of a name counts."""
        found: dict[str, str] = {}
        for node in walked(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    found.setdefault(alias.asname or root, alias.name if alias.asname else root)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}")
        return found

    @cached_property
    def uses_torch(self) -> bool:
        """Whether the file imports torch or halfstep, and no framework whose scaler has methods of the same names."""
        roots = {target.lstrip(".").partition(".")[0] for target in self.imports.values()}
        return bool(roots & {"torch", "halfstep"}) and not roots & {"paddle", "megengine", "mindspore", "tensorflow"}

    def name(self, node: ast.AST) -> str:
        """Return the dotted name of an expression with its imports resolved, such as "torch.half"; "" if it is none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])

    def key(self, node: ast.AST) -> str:
        """Return what identifies an object in the file: its dotted name, or its source (``optimizers[0]``)."""
        return self.name(node) or ast.unparse(node)

    def called(self, node: ast.AST) -> str:
        """Return the dotted name of the function that `node` calls; "" if it is no call or has no such name."""
        return self.name(node.func) if isinstance(node, ast.Call) else ""

    def operator(self, node: ast.AST) -> str:
        """Return the function that `node` calls, or the class whose instance it calls: ``loss = nn.MSELoss()``."""
        made = self.constant(node.func) if isinstance(node, ast.Call) else None
        return self.called(made) if isinstance(made, ast.Call) else self.called(node)

    @cached_property
    def assigned(self) -> dict[str, list[Value]]:
        """Name or attribute -> every value that the file assigns to it."""
        found: dict[str, list[Value]] = {}
        for node in walked(self.tree):
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                pairs = [(node.target, node.value)]
            else:
                continue
            for target, value in pairs:
                for key, each in self._bound(target, value):
                    found.setdefault(key, []).append(each)
        return found

    def _bound(self, target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Value]]:
        if not isinstance(target, (ast.Tuple, ast.List)):
            yield self.key(target), Value(value)
        elif isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            for part, each in zip(target.elts, value.elts, strict=True):
                yield from self._bound(part, each)
        else:
            yield from ((self.key(part), Value(value, index)) for index, part in enumerate(target.elts))

    def constant(self, node: ast.expr | None) -> ast.expr | None:
        """Return `node`, or what it was assigned if it is a name with one value in the file that is no argument."""
        if isinstance(node, (ast.Name, ast.Attribute)) and (key := self.key(node)) not in self._arguments:
            values = self.assigned.get(key, [])
            if len(values) == 1 and values[0].index is None:
                return values[0].node
        return node

    def local(self, function: Function, node: ast.expr) -> ast.expr:
        """Return `node`, or the one value that a function assigns to it if it is a name."""
        if not isinstance(node, ast.Name) or any(argument.arg == node.id for argument in function.arguments):
            return node
        values = [
            n.value
            for n in walked(function.node)
            if isinstance(n, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == node.id for target in n.targets for t in walked(target))
        ]
        stores = [n for n in walked(function.node) if isinstance(n, ast.Name) and n.id == node.id]
        stores = [n for n in stores if isinstance(n.ctx, ast.Store)]
        return values[0] if len(values) == len(stores) == 1 and not isinstance(values[0], ast.Tuple) else node

    @cached_property
    def _arguments(self) -> set[str]:
        return {argument.arg for function in self.functions for argument in function.arguments}

    def format_of(self, node: ast.expr | None) -> str:
        """Return "fp16", "bf16", "fp32" or "fp64" for an expression that is such a dtype; "" if it is not known."""
        found = self.constant(node)
        return FORMATS.get(self.name(found), "") if found is not None else ""

    def low_format(self, call: ast.Call) -> str:
        """Return "fp16" or "bf16" if a call is ``x.half()``, ``x.bfloat16()`` or ``x.to(torch.float16)``, else ""."""
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method in ("half", "bfloat16") and not call.args:
            return "fp16" if method == "half" else "bf16"
        given = (*call.args, *(k.value for k in call.keywords if k.arg == "dtype")) if method == "to" else ()
        return next((form for a in given if (form := self.format_of(a)) in ("fp16", "bf16")), "")

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call of the file."""
        return [node for node in walked(self.tree) if isinstance(node, ast.Call)]

    # ------------------------------------------------------------------ functions

    @cached_property
    def functions(self) -> list[Function]:
        """The top level, then every function and method."""
        found = [Function("", self.tree)]
        owners = {id(m): c.name for c in walked(self.tree) if isinstance(c, ast.ClassDef) for m in c.body}
        for node in walked(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append(Function(node.name, node, owners.get(id(node), "")))
        return found

    @cached_property
    def mentions(self) -> dict[str, set[str]]:
        """Name of a function of the file -> the names and attributes that its body mentions."""
        return {
            f.name: {self.name(n) for n in walked(f.node) if isinstance(n, (ast.Name, ast.Attribute))}
            for f in self.functions
            if f.name
        }


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in `node` in the order in which they are made, without those in functions it defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call):
        yield node
