"""A script as the static rules read it: its syntax tree, what its names stand for, and the roles of its objects.

Nothing is imported or run. A name is resolved through the file's imports (``F.relu`` -> ``torch.nn.functional.relu``)
or through what the file assigns to it. An object has a role (loss scaler, optimizer, scheduler, model) by the call that
made it, or by methods that only such objects have.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from halfstep.advise.lint.rule import PATTERNS, WORDS
from halfstep.advise.lint.static.inline import inlined
from halfstep.errors import LintError

SCALERS = PATTERNS["SCALERS"]
OPTIMIZERS = PATTERNS["OPTIMIZERS"]
OPTIMIZER_METHODS = ("step", "second_step", "zero_grad", "state_dict", "load_state_dict")
OPTIMIZER_NAME = PATTERNS["OPTIMIZER_NAME"]
SCHEDULER_NAME = re.compile(r"sched", re.IGNORECASE)


@lru_cache(maxsize=16384)
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return a node and all nodes below it; rules walk through the same ones again and again."""
    return tuple(ast.walk(node))


def method(node: ast.AST | None) -> str:
    """Return the method that `node` calls; "" if it calls none."""
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def stored(*nodes: ast.AST) -> set[str]:
    """Return the names that are assigned in `nodes`."""
    return {n.id for node in nodes for n in walked(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement or ``:=`` assigns to; nothing for other nodes."""
    if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


@lru_cache(maxsize=16384)
def calls_in(node: ast.AST) -> tuple[ast.Call, ...]:
    """Return the calls in `node` in the order in which they are made, without those in functions it defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Name, ast.Constant)):
        return ()
    inner = [call for child in ast.iter_child_nodes(node) for call in calls_in(child)]
    return (*inner, node) if isinstance(node, ast.Call) else tuple(inner)


def argument(call: ast.Call, index: int | None, name: str) -> ast.expr | None:
    """Return an argument of a call by its place or its name; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if index is not None and index < len(call.args) and not any(isinstance(arg, ast.Starred) for arg in call.args):
        return call.args[index]
    return None


def parameters_of(script: Script, call: ast.expr) -> str:
    """Return the model that an optimizer is made for with ``Class(model.parameters(), ...)``; "" for other calls."""
    first = argument(call, 0, "params") if OPTIMIZERS.fullmatch(script.called(call)) else None  # type: ignore[arg-type]
    return script.owner(first) if first is not None and method(first) == "parameters" else ""


Function = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
"""A function, a method, or the top level of a file."""


@dataclass(frozen=True, eq=False)
class Value:
    """What is assigned to a name: an expression, or the part `index` of one that is unpacked."""

    node: ast.expr
    index: int | None = None


class Script:
    """One Python file: its source `text` and its syntax `tree`."""

    def __init__(self, text: str, path: str = "<script>") -> None:
        self.text = text
        try:
            self.tree = inlined(ast.parse(text))
        except (SyntaxError, ValueError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise LintError(f"{path}{line} cannot be parsed: {reason}") from error

    @classmethod
    def read(cls, path: Path) -> Script:
        """Return the script in a file."""
        try:
            return cls(path.read_text(encoding="utf-8-sig"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise LintError(f"file {str(path)!r} cannot be read: {error}") from error

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Every call of the file."""
        return [node for node in walked(self.tree) if isinstance(node, ast.Call)]

    @cached_property
    def definitions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method."""
        return [node for node in walked(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]

    @cached_property
    def functions(self) -> list[Function]:
        """The top level, then every function and method."""
        return [self.tree, *self.definitions]

    @cached_property
    def imports(self) -> dict[str, str]:
        """Name in the file -> the module or object it was imported as; the first import of a name counts."""
        found: dict[str, str] = {}
        for node in walked(self.tree):
            for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
                if isinstance(node, ast.ImportFrom):
                    found.setdefault(alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}")
                else:
                    root = alias.name.partition(".")[0]
                    found.setdefault(alias.asname or root, alias.name if alias.asname else root)
        return found

    @cached_property
    def uses_torch(self) -> bool:
        """Whether the file imports torch or halfstep, and no framework whose scaler has methods of the same names."""
        roots = {target.lstrip(".").partition(".")[0] for target in self.imports.values()}
        return bool(roots & {"torch", "halfstep"}) and not roots & {"paddle", "megengine", "mindspore", "tensorflow"}

    def name(self, node: ast.AST | None) -> str:
        """Return the dotted name of an expression with its imports resolved, such as "torch.half"; "" if it is none.

        An item with a constant key has a name too: "state['scaler']".
        """
        match node:
            case ast.Name(id=name):
                return self.imports.get(name, name)
            case ast.Attribute(value=value, attr=attr):
                return f"{name}.{attr}" if (name := self.name(value)) else ""
            case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as index)):
                return f"{name}[{index!r}]" if (name := self.name(value)) else ""
        return ""

    def key(self, node: ast.AST) -> str:
        """Return what identifies an object in the file: its dotted name, or its source (``optimizers[0]``)."""
        return self.name(node) or ast.unparse(node)

    def target(self, statement: ast.stmt) -> str:
        """Return the object that an assignment makes; "" for other statements."""
        return self.key(statement.targets[0]) if isinstance(statement, ast.Assign) else ""

    def called(self, node: ast.AST | None) -> str:
        """Return the dotted name of the function that `node` calls; "" if it is no call or has no such name."""
        return self.name(node.func) if isinstance(node, ast.Call) else ""

    def owner(self, node: ast.AST | None) -> str:
        """Return the dotted name of the object whose method `node` calls; "" if it is none or has no such name."""
        return self.called(node).rpartition(".")[0]

    def operator(self, node: ast.AST) -> str:
        """Return the function that `node` calls, or the class whose instance it calls: ``loss = nn.MSELoss()``."""
        made = self.constant(node.func) if isinstance(node, ast.Call) else None
        return self.called(made if isinstance(made, ast.Call) else node)

    @cached_property
    def assigned(self) -> dict[str, list[Value]]:
        """Name or attribute -> every value that the file assigns to it."""
        found: dict[str, list[Value]] = {}
        for node in walked(self.tree):
            for target in targets(node) if not isinstance(node, ast.AugAssign) else ():
                for key, value in self._bound(target, node.value):  # type: ignore[attr-defined]  # it is one of them
                    found.setdefault(key, []).append(value)
            for one in node.body if isinstance(node, ast.ClassDef) else ():
                for key, value in [pair for t in targets(one) for pair in self._bound(t, getattr(one, "value", None))]:
                    found.setdefault(f"self.{key}", []).append(value)
        return found

    def _bound(self, target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, Value]]:
        if value is None:
            return
        if not isinstance(target, (ast.Tuple, ast.List)):
            yield (key := self.key(target)), Value(value)
            if isinstance(value, ast.Dict):
                parts = [(k, v) for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant)]
                yield from ((f"{key}[{k.value!r}]", Value(v)) for k, v in parts)
            elif self.called(value) in {"types.SimpleNamespace", "argparse.Namespace", *self.classes}:
                yield from ((f"{key}.{k.arg}", Value(k.value)) for k in value.keywords)  # type: ignore[attr-defined]
        elif isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            for part, each in zip(target.elts, value.elts, strict=True):
                yield from self._bound(part, each)
        else:
            yield from ((self.key(part), Value(value, index)) for index, part in enumerate(target.elts))

    def constant(self, node: ast.expr | None) -> ast.expr | None:
        """Return `node`, or what it stands for: the one value of a name, an item of a table, the default of an option.

        An argument stands for what every call in the file gives it.
        """
        for _ in range(5):
            if (made := self._value(node)) is None:
                break
            node = made
        return node

    def _value(self, node: ast.expr | None) -> ast.expr | None:
        match node:
            case ast.Subscript(table, key) | ast.Call(ast.Attribute(table, "get"), [key, *_]):
                items = self.constant(table) if isinstance(table, (ast.Name, ast.Attribute, ast.Dict)) else None
                pairs = zip(items.keys, items.values, strict=True) if isinstance(items, ast.Dict) else ()
                return next(
                    (v for k, v in pairs if k and ast.unparse(k) == ast.unparse(self.constant(key) or key)), None
                )
            case ast.Name(id=name) if name in self.given:
                return self.given[name]
            case ast.Attribute(value=owner, attr=name) if self.parsed and self.key(owner) in self.parsed:
                added = [c for c in self.calls if method(c) == "add_argument"]
                made = [c for c in added if f"'__{name}'" in ast.unparse(c).replace("-", "_")]
                return argument(made[0], None, "default") if made else None
            case ast.Name() | ast.Attribute() if (name := self.own(self.key(node))) not in self._arguments:
                return self._single.get(name)
        return None

    @cached_property
    def _single(self) -> dict[str, ast.expr]:
        every = {key: [v.node for v in vs] for key, vs in self.assigned.items() if all(v.index is None for v in vs)}
        # code that is put in the place of calls stands twice
        return {k: n[0] for k, n in every.items() if len(n) == 1 or len(set(map(ast.unparse, n))) == 1}

    def own(self, key: str) -> str:
        """Return an attribute as its class, if that is of the file, has it: ``self.shadow`` of ``ema.shadow``."""
        owner, _, name = key.rpartition(".")
        return f"self.{name}" if key not in self.assigned and self.makers(owner) & self.classes else key

    @cached_property
    def parsed(self) -> set[str]:
        """The objects that have the options of a command line."""
        return {key for key in self.assigned if any("parse_args" in made for made in self.makers(key))}

    def results(self, node: ast.expr) -> list[ast.expr]:
        """Return the values that an expression may have: those of its name, and what a function of the file returns."""
        name = self.called(node).rpartition(".")[2]
        makers = [each for each in self.definitions if each.name == name]
        returned = [n.value for m in makers for n in walked(m) if isinstance(n, ast.Return) and n.value is not None]
        values = [value for value in self.values(self.key(node)) if value is not node]
        more = [v for r in returned for v in (r, *self.values(self.key(r)))]
        return [node, *values, *more, *(r for v in values if isinstance(v, ast.Call) for r in self.results(v)[1:])]

    def values(self, key: str) -> list[ast.expr]:
        """Return what the file assigns to an object and to its items."""
        return [v.node for k, values in self.assigned.items() if k == key or k.startswith(f"{key}[") for v in values]

    @cached_property
    def classes(self) -> set[str]:
        """The names of the classes of the file."""
        return {node.name for node in walked(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def _arguments(self) -> set[str]:
        every = [definition.args for definition in self.definitions]
        return {a.arg for args in every for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}

    @cached_property
    def given(self) -> dict[str, ast.expr]:
        """Argument that one function of the file has -> what every call of it gives, or its default."""
        calls: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            calls.setdefault(self.called(call).rpartition(".")[2], []).append(call)
        makers = {id(m): c.name for c in walked(self.tree) if isinstance(c, ast.ClassDef) for m in c.body}
        found: dict[str, list[ast.expr | None]] = {}
        for one in self.definitions:
            args, of = one.args, calls.get(makers.get(id(one), "") if one.name == "__init__" else one.name, [])
            every = [*args.posonlyargs, *args.args]
            values = [*[None] * (len(every) - len(args.defaults)), *args.defaults, *args.kw_defaults]
            first = int(bool(every) and every[0].arg in ("self", "cls"))
            for index, (arg, value) in enumerate(zip([*every, *args.kwonlyargs], values, strict=True), -first):
                place = index if 0 <= index < len(every) - first else None
                given = [argument(call, place, arg.arg) or value for call in of] or [value]
                same = len(given) == 1 or len({v and ast.unparse(v) for v in given}) == 1
                found.setdefault(arg.arg, []).append(given[0] if same else None)
        named = stored(self.tree)
        return {name: v[0] for name, v in found.items() if len(v) == 1 and v[0] is not None and name not in named}

    def is_number(self, node: ast.AST, deep: int = 4) -> bool:
        """Return whether a value is a Python number, which widens no tensor; follows `deep` assignments."""
        match node:
            case ast.Constant(value=value):
                return isinstance(value, (int, float))
            case ast.UnaryOp(operand=operand):
                return self.is_number(operand, deep)
            case ast.BinOp(left=left, right=right):
                return self.is_number(left, deep) and self.is_number(right, deep)
            case ast.Call():
                name = self.called(node)
                return name in ("len", "int", "float") or name.startswith("math.") or method(node) == "size"
            case ast.Subscript(value=ast.Attribute(attr="shape")):
                return True
            case ast.Attribute(value=owner) if self.parsed and self.key(owner) in self.parsed:
                return True
            case ast.Name() | ast.Attribute():
                made = self.constant(node)
                if isinstance(made, ast.BinOp) and isinstance(made.op, ast.Pow) and isinstance(node, ast.Attribute):
                    return self.is_number(made.right, 0)  # self.scale = dim**-0.5
                return made is not node and made is not None and deep > 0 and self.is_number(made, deep - 1)
        return False

    def format_of(self, node: ast.expr | None) -> str:
        """Return "fp16", "bf16", "fp32" or "fp64" for an expression that is such a dtype; "" if it is not known."""
        return str(WORDS["FORMATS"].get(self.name(self.constant(node)), ""))

    def low_format(self, call: ast.AST) -> str:
        """Return "fp16" or "bf16" if a call is ``x.half()``, ``x.bfloat16()`` or ``x.to(torch.float16)``, else ""."""
        if not isinstance(call, ast.Call):
            return ""
        if method(call) in ("half", "bfloat16") and not call.args:
            return "fp16" if method(call) == "half" else "bf16"
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "dtype")] if method(call) == "to" else []
        return next((form for a in given if (form := self.format_of(a)) in ("fp16", "bf16")), "")

    @cached_property
    def mentions(self) -> dict[str, set[str]]:
        """Name of a function of the file -> the names and attributes that its body mentions."""
        named = {each.name: walked(each) for each in self.definitions}
        return {f: {self.name(n) for n in ns if isinstance(n, (ast.Name, ast.Attribute))} for f, ns in named.items()}

    def makers(self, key: str) -> set[str]:
        """Return the names of the functions whose results an object may be; "" for one without a name."""
        nodes = [value.node for value in self.assigned.get(key, []) if value.index is None]
        for node in nodes:
            nodes += [node.body, node.orelse] if isinstance(node, ast.IfExp) else []
        return {self.called(node) for node in nodes if isinstance(node, ast.Call)}

    def _made_by(self, pattern: re.Pattern[str]) -> set[str]:
        return {key for key in self.assigned if any(map(pattern.fullmatch, self.makers(key)))}

    @cached_property
    def scalers(self) -> dict[str, str]:
        """Loss scaler -> the library it is from, "torch" or "halfstep"."""
        found: dict[str, str] = {}
        for key, values in self.assigned.items() if self.uses_torch else ():
            made = self.makers(key) - {""}
            own = set(filter(SCALERS.fullmatch, made))
            if own == made and own:
                found[key] = "halfstep" if any(name.startswith("halfstep.") for name in made) else "torch"
            elif not own and any(v.index == 2 and self.called(v.node) == "halfstep.prepare" for v in values):
                found[key] = "halfstep"
        for key in {self.owner(call) for call in self.calls} if self.uses_torch else ():  # scalers["g"]
            several = [v.node for v in self.assigned.get(key.partition("[")[0], []) if key.endswith("]")]
            if any(isinstance(n, ast.DictComp) and SCALERS.fullmatch(self.called(n.value)) for n in several):
                found[key] = "torch"
        called = {key for key, values in self.assigned.items() if any(isinstance(v.node, ast.Call) for v in values)}
        strangers = called - found.keys()
        for node in walked(self.tree) if self.uses_torch else ():
            match node:
                case ast.arg(annotation=ast.expr() as annotation) if "GradScaler" in ast.unparse(annotation):
                    found.setdefault(node.arg, "torch")
                case ast.ClassDef(body=body):
                    fields = [
                        f for f in body if isinstance(f, ast.AnnAssign) and "GradScaler" in ast.unparse(f.annotation)
                    ]
                    found |= {f"self.{ast.unparse(field.target)}": "torch" for field in fields}
                case ast.Call(func=ast.Attribute(attr="unscale_" | "backward" as name, value=value)):
                    call = node if name == "unscale_" else value  # unscale_(optimizer), scale(loss).backward()
                    one = method(call) in ("unscale_", "scale") and len(getattr(call, "args", ())) == 1
                    if one and (key := self.owner(call)) and key not in strangers:
                        found.setdefault(key, "torch")
        return found | {key: found[own] for key, own in self._of_others(found) if key not in strangers}

    def _of_others(self, known: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield (``trainer.scaler``, ``self.scaler``) for owners of calls whose attribute a class of the file has."""
        for owner in {self.owner(call) for call in self.calls}:
            own = f"self.{owner.rpartition('.')[2]}"
            if "." in owner and not owner.startswith("self.") and own in known:
                yield owner, own

    @cached_property
    def keeps_scaled(self) -> bool:
        """Whether a name of the file is assigned a scaled loss."""
        every = [value.node for values in self.assigned.values() for value in values]
        return any(method(node) == "scale" and self.owner(node) in self.scalers for node in every)

    @cached_property
    def optimizers(self) -> set[str]:
        """Optimizers: made by an optimizer's class, stepped or unscaled by a scaler, or named as one."""
        found = self._made_by(OPTIMIZERS)
        for call in self.calls:
            owner = self.owner(call)
            if method(call) in ("step", "unscale_") and owner in self.scalers and call.args:
                found.add(self.key(call.args[0]))
            elif method(call) == "first_step":  # of SAM, whatever its name
                found.add(owner)
            elif method(call) in OPTIMIZER_METHODS and OPTIMIZER_NAME.search(owner):
                found.add(owner)
        return (found | {key for key, _ in self._of_others(found)}) - self.schedulers

    @cached_property
    def optimizer_of(self) -> dict[str, str]:
        """Model -> the optimizer of its parameters; empty if the file makes one for others than one whole model."""
        every = [(key, v.node) for key, values in self.assigned.items() for v in values if v.index is None]
        made = {key: parameters_of(self, node) for key, node in every if OPTIMIZERS.fullmatch(self.called(node))}
        found = {model: key for key, model in made.items()}
        return found if len(found) == len(made) and "" not in found else {}

    @cached_property
    def schedulers(self) -> set[str]:
        """Learning-rate schedulers: made by one of torch's classes or a ``get_..._schedule...``, or named as one."""
        steps = {self.owner(call) for call in self.calls if method(call) == "step"}
        return self._made_by(PATTERNS["SCHEDULERS"]) | set(filter(SCHEDULER_NAME.search, steps))

    @cached_property
    def models(self) -> set[str]:
        """Modules: objects whose parameters or mode the file asks for."""
        methods = ("parameters", "named_parameters", "train", "eval", "modules")
        owners = {self.owner(call) for call in self.calls if method(call) in methods}
        found = owners - {"", "self", "super"} - self.imports.keys()
        for key, values in self.assigned.items():  # self.net = net.cuda()
            node: ast.AST = values[0].node
            while method(node) in ("cuda", "to", "half", "float", "bfloat16", "train", "eval"):
                node = node.func.value  # type: ignore[attr-defined]  # it calls a method
            if len(values) == 1 and values[0].index is None and self.name(node) in owners and "." in key:
                found.add(key)
        return found

    def methods_of(self, key: str) -> Iterator[ast.Call]:
        """Yield the calls of methods of an object: in the source, and on the value that it is assigned."""
        yield from (call for call in self.calls if method(call) and self.owner(call) == key)
        for value in self.assigned.get(key, []):
            node: ast.AST = value.node if value.index is None else ast.Pass()
            while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if self.owner(node) != key:  # else it was yielded above
                    yield node
                node = node.func.value
