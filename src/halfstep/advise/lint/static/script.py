"""A script as the static rules read it: its syntax tree, what its names stand for, and the roles of its objects.

Nothing is imported or run. A name is resolved through the file's imports (``F.relu`` -> ``torch.nn.functional.relu``);
an object has a role (loss scaler, optimizer, scheduler) by the call that made it, or by methods that only such objects
have.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from halfstep.errors import LintError

__all__ = ["FORMATS", "Function", "Script", "calls_in", "walked"]

Body = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef

SCALERS = re.compile(r"(torch\..*|halfstep)\.(Sharded)?GradScaler")
OPTIMIZERS = re.compile(
    r"torch\.optim\.(?!lr_scheduler|swa_utils)(\w+\.)?[A-Z]\w+"
    r"|(.*\.)?(Fused|Distributed)?(Adam|AdamW|SGD|Adafactor|Lion|RMSprop)"
)
OPTIMIZER_NAME = re.compile(r"(^|[._])(optim|optimizers?|opt)(_\w+|\d*)?$|_optim(izer)?$", re.IGNORECASE)
OPTIMIZER_METHODS = ("step", "first_step", "second_step", "zero_grad", "state_dict", "load_state_dict")
SCHEDULERS = re.compile(r"torch\.optim\.lr_scheduler\.[A-Z]\w+|(.*\.)?get_\w*schedule\w*")
SCHEDULER_NAME = re.compile(r"sched", re.IGNORECASE)

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


class Script:
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
    def read(cls, path: Path) -> Script:
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

    # ------------------------------------------------------------------ roles

    @cached_property
    def scalers(self) -> dict[str, str]:
        """Loss scaler -> the library it is from, "torch" or "halfstep"."""
        if not self.uses_torch:
            return {}
        found: dict[str, str] = {}
        for key, values in self.assigned.items():
            made = [name for value in values for name in self._made(value)]
            if any(SCALERS.fullmatch(name) for name in made):
                others = [name for name in made if name and not SCALERS.fullmatch(name)]
                if not others:
                    found[key] = "halfstep" if any(name.startswith("halfstep.") for name in made) else "torch"
            elif any(value.index == 2 and self.called(value.node) == "halfstep.prepare" for value in values):
                found[key] = "halfstep"
        strangers = {key for key, values in self.assigned.items() if key not in found and any(map(self._calls, values))}
        for node in walked(self.tree):
            if (
                isinstance(node, ast.arg)
                and node.annotation is not None
                and "GradScaler" in ast.unparse(node.annotation)
            ):
                found.setdefault(node.arg, "torch")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if node.func.attr == "backward" and isinstance(owner, ast.Call) and self._is_scale(owner):
                    owner = owner.func.value  # type: ignore[attr-defined]  # a scale call's function is an attribute
                elif node.func.attr != "unscale_" or len(node.args) != 1:
                    continue
                if (key := self.name(owner)) and key not in strangers:
                    found.setdefault(key, "torch")
        return found

    @cached_property
    def keeps_scaled(self) -> bool:
        """Whether a name of the file is assigned a scaled loss."""
        return any(
            isinstance(value.node, ast.Call) and self.called(value.node).rpartition(".")[::2] == (key, "scale")
            for values in self.assigned.values()
            for value in values
            for key in self.scalers
        )

    def _calls(self, value: Value) -> bool:
        return isinstance(value.node, ast.Call)

    @staticmethod
    def _is_scale(node: ast.Call) -> bool:
        return isinstance(node.func, ast.Attribute) and node.func.attr == "scale" and len(node.args) == 1

    def _made(self, value: Value) -> Iterator[str]:
        """Yield the names of the functions whose results a value may be."""
        if value.index is None:
            nodes = [value.node]
            while nodes:
                node = nodes.pop()
                if isinstance(node, ast.IfExp):
                    nodes += [node.body, node.orelse]
                elif isinstance(node, ast.Call):
                    yield self.called(node)

    @cached_property
    def optimizers(self) -> set[str]:
        """Optimizers: made by an optimizer's class, stepped or unscaled by a scaler, or named as one."""
        found = {
            key
            for key, values in self.assigned.items()
            if any(OPTIMIZERS.fullmatch(name) for value in values for name in self._made(value))
        }
        for node in walked(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, method = self.name(node.func.value), node.func.attr
                if method in ("step", "unscale_") and owner in self.scalers and node.args:
                    found.add(self.key(node.args[0]))
                elif method in OPTIMIZER_METHODS and OPTIMIZER_NAME.search(owner):
                    found.add(owner)
        return found - self.schedulers

    @cached_property
    def models(self) -> set[str]:
        """Modules: objects whose parameters or mode the file asks for."""
        methods = ("parameters", "named_parameters", "train", "eval", "modules")
        owners = {
            self.name(node.func.value)
            for node in self.calls
            if isinstance(node.func, ast.Attribute) and node.func.attr in methods
        }
        return owners - {"", "self", "super"} - self.imports.keys()

    def methods_of(self, key: str) -> Iterator[ast.Call]:
        """Yield the calls of methods of an object: in the source, and on the value that it is assigned."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and self.name(call.func.value) == key:
                yield call
        for value in self.assigned.get(key, []):
            node: ast.AST = value.node if value.index is None else ast.Pass()
            while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if self.name(node.func.value) != key:  # else it was yielded above
                    yield node
                node = node.func.value

    def makers(self, key: str) -> set[str]:
        """Return the names of the functions whose results an object may be; "" for one without a name."""
        return {name for value in self.assigned.get(key, []) for name in self._made(value)}

    @cached_property
    def schedulers(self) -> set[str]:
        """Learning-rate schedulers: made by one of torch's classes or a ``get_..._schedule...``, or named as one."""
        found = {
            key
            for key, values in self.assigned.items()
            if any(SCHEDULERS.fullmatch(name) for value in values for name in self._made(value))
        }
        for node in walked(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                if SCHEDULER_NAME.search(owner := self.name(node.func.value)):
                    found.add(owner)
        return found


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in `node` in the order in which they are made, without those in functions it defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child)
    if isinstance(node, ast.Call):
        yield node
