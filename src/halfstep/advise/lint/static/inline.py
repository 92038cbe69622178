"""Functions of a file put in the place of their calls, so that rules see one training step in one function.

``model, optimizer = make()`` becomes the statements of `make` with the names of its results, and a parameter becomes
the argument; lines stay those of the function. This is done with functions, methods that a class calls of itself and
those of objects that one class of the file makes. They are defined once, have nothing behind a return, and are called
whenever the statement runs.
"""

import ast
import re
from collections.abc import Mapping
from copy import deepcopy

DEPTH = 4  # functions in functions that are followed
MOST_NODES = 8000  # nodes of the syntax tree of a function that is put in place
BUDGET = 100_000  # nodes that are put in place in one file

ODD = (ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""What a function that is put in place does not have."""

PERHAPS = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions of which some parts are not computed once."""

ENTERED = re.compile(r"(^|\.)(no_grad|inference_mode|autocast)\b")  # decorators, entered like a block
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def inlined(tree: ast.Module) -> ast.Module:
    """Return the tree with calls of its own plain functions replaced by their statements."""
    tree.body = [part for statement in tree.body for part in _unguarded(statement)]
    nodes = list(ast.walk(tree))
    every = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = [node.name for node in every]
    methods: dict[str, dict[str, ast.FunctionDef]] = {}  # name of a class -> its methods and those of its bases
    plain = {n.name: made for n in every if names.count(n.name) == 1 and (made := _plain(n)) is not None}
    of_class = {id(n): c.name for c in classes for n in c.body}
    for one in classes:
        inside = [name for n in one.body if (name := getattr(n, "name", "")) in plain]
        own = {f"self.{name}": plain.pop(name) for name in inside}
        bases = [methods.get(base.id, {}) for base in one.bases if isinstance(base, ast.Name)]
        methods[one.name] = {k: v for found in (*bases, own) for k, v in found.items()}
    walk = _Inliner()
    known = plain | _of_objects(nodes, methods)
    for node in every:
        walk.functions = {**known, **methods.get(of_class.get(id(node), ""), {})}
        node.body = walk.block(node.body, {node.name, f"self.{node.name}"})
    walk.functions = known
    tree.body = walk.block(tree.body, set())
    nodes = list(ast.walk(tree))
    named = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    for owner in [node for node in nodes if isinstance(node, (ast.Module, *DEFINITIONS))]:
        kept = [s for s in owner.body if getattr(s, "name", "") not in walk.done - named or _is_epoch(s)]
        owner.body = kept or [ast.Pass()]
    return tree


def _of_objects(nodes: list[ast.AST], methods: dict[str, dict[str, ast.FunctionDef]]) -> dict[str, ast.FunctionDef]:
    """Return the methods of objects that are made by one class of the file, or annotated as such, with their name."""
    made: dict[str, set[str]] = {}
    for node in nodes if methods else ():
        match node:
            case ast.Assign([ast.Name() | ast.Attribute() as target], value):
                key = target.id if isinstance(target, ast.Name) else ast.unparse(target)
                made.setdefault(key, set()).add(getattr(getattr(value, "func", None), "id", ""))
            case ast.arg(arg=key, annotation=ast.Name(id=name)):
                made.setdefault(key, set()).add(name)
    found = {}
    for key, names in made.items():
        for name, one in methods.get(min(names), {}).items() if len(names) == 1 else ():
            owner = ast.parse(key, mode="eval").body
            place = name.replace("self", key, 1).removesuffix(".__call__")
            args = ast.arguments(**dict(ast.iter_fields(one.args)))
            args.kwonlyargs, args.kw_defaults = [*args.kwonlyargs, ast.arg("self")], [*args.kw_defaults, owner]
            if one.name not in ("forward", "__init__", "first_step", "second_step"):  # which are known by their names
                found[place] = ast.FunctionDef(one.name, args, one.body, [])
    return found


def _unguarded(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements under ``if __name__ == "__main__"``, which is no condition of a step."""
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return statement.body
    return [statement]


def _is_epoch(node: ast.stmt) -> bool:
    """Return whether a function runs a training loop, and so is a place of its own."""
    loops = [n for n in ast.walk(node) if isinstance(n, (ast.For, ast.While))]
    return any(isinstance(n, ast.Attribute) and n.attr == "backward" for loop in loops for n in ast.walk(loop))


def _plain(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef | None:
    """Return a function as it is put in place, without self; None if it is not."""
    args, inner = node.args, [n for statement in node.body for n in ast.walk(statement)]
    entered = all(ENTERED.search(ast.unparse(decorator)) for decorator in node.decorator_list)
    odd = args.vararg or args.kwarg or not entered or any(isinstance(n, ODD) for n in inner)
    if odd or len(inner) > MOST_NODES or isinstance(node, ast.AsyncFunctionDef):
        return None
    node = deepcopy(node)
    body = _tailed(_entered(node))
    if [each.arg for each in node.args.args[:1]] == ["self"]:
        del node.args.args[0]
    return None if body is None else ast.FunctionDef(node.name, node.args, body, [])


def _entered(node: ast.FunctionDef) -> list[ast.stmt]:
    """Return the body of a function in the blocks that its decorators enter, its result in a name behind them."""
    body, behind = node.body, list[ast.stmt]()
    if node.decorator_list and isinstance(last := body[-1], ast.Return) and last.value is not None:
        name = f"{node.name}_result"
        body = [*body[:-1], ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], last.value), last)]
        behind = [ast.copy_location(ast.Return(ast.Name(name, ast.Load())), last)]
    for decorator in reversed(node.decorator_list):
        body = [ast.copy_location(ast.With([ast.withitem(decorator)], body), node)]
    return [ast.fix_missing_locations(statement) for statement in (*body, *behind)]


def _tailed(body: list[ast.stmt]) -> list[ast.stmt] | None:
    """Return statements with nothing behind a return: what follows ``if x: return`` is its else; None if none are."""
    for index, statement in enumerate(body):
        rest = body[index + 1 :]
        match statement:
            case ast.Return():
                return body[: index + 1]
            case ast.If(body=first, orelse=other) if _returns(statement):
                one, two = _tailed(first), _tailed([*other, *rest])
                if one is None or two is None or (rest and not isinstance(first[-1], (ast.Return, ast.Raise))):
                    return None
                statement.body, statement.orelse = one, two
                return body[: index + 1]
            case ast.With(body=first) if _returns(statement):
                one = _tailed(first)
                if one is None or rest:
                    return None
                statement.body = one
            case _ if _returns(statement):
                return None
    return body


def _returns(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Return) for n in ast.walk(node))


class _Inliner:
    """Replaces calls of `functions`; `done` has the names of those that were put in place."""

    def __init__(self) -> None:
        self.functions: Mapping[str, ast.FunctionDef] = {}
        self.done: set[str] = set()
        self.left = BUDGET

    def block(self, body: list[ast.stmt], inside: set[str]) -> list[ast.stmt]:
        return [part for statement in body for part in self.statement(statement, inside)]

    def statement(self, node: ast.stmt, inside: set[str]) -> list[ast.stmt]:
        if isinstance(node, DEFINITIONS):
            return [node]
        for field in ("body", "orelse", "finalbody"):
            if part := getattr(node, field, None):
                setattr(node, field, self.block(part, inside))
        before: list[ast.stmt] = []
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        call = node.value if isinstance(node, ast.Expr) or target is not None else None  # type: ignore[attr-defined]
        for field in () if isinstance(node, ast.While) else ("value", "test", "iter"):
            if (part := getattr(node, field, None)) is not None and part is not call:
                setattr(node, field, self.expression(part, inside, before))
        for item in getattr(node, "items", ()):
            item.context_expr = self.expression(item.context_expr, inside, before)
        if call is not None:
            self.parts(call, inside, before)
        placed = self.placed(call, target, inside)
        return [*before, *([node] if placed is None else placed)]

    def expression(self, node: ast.expr, inside: set[str], before: list[ast.stmt]) -> ast.expr:
        """Return an expression with calls replaced by what is returned; `before` gets the other statements."""
        self.parts(node, inside, before)
        function = self.functions.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        if function is not None and isinstance(function.body[-1], ast.Return):
            match self.placed(node, None, inside):
                case [*others, ast.Expr(value=result)]:
                    before += others
                    return result
        return node

    def parts(self, node: ast.AST, inside: set[str], before: list[ast.stmt]) -> None:
        for field, value in () if isinstance(node, PERHAPS) else ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(node, field, self.expression(value, inside, before))
            elif isinstance(value, list):
                value[:] = [self.expression(v, inside, before) if isinstance(v, ast.expr) else v for v in value]
                for keyword in value:
                    if isinstance(keyword, ast.keyword):
                        keyword.value = self.expression(keyword.value, inside, before)

    def placed(self, call: ast.expr | None, target: ast.expr | None, inside: set[str]) -> list[ast.stmt] | None:
        """Return the statements of a function that is called, its result in `target` or in the last one, or None."""
        name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        followed = name not in inside and len(inside) <= 2 * DEPTH and self.left > 0
        function = self.functions.get(name) if followed else None
        given = _given(function.args, call) if function is not None and isinstance(call, ast.Call) else None
        if function is None or given is None:
            return None
        self.done.add(function.name)
        made = _placed(function, given, target)
        self.left -= sum(1 for statement in made for _ in ast.walk(statement))
        return self.block(made, {*inside, name, function.name})


def _given(declared: ast.arguments, call: ast.Call) -> dict[str, ast.expr] | None:
    places = [p.arg for p in (*declared.posonlyargs, *declared.args)]
    others = [p.arg for p in declared.kwonlyargs]
    found = dict(zip(reversed(places), reversed(declared.defaults), strict=False))
    found |= {name: value for name, value in zip(others, declared.kw_defaults, strict=True) if value is not None}
    found |= dict(zip(places, call.args, strict=False)) | {str(k.arg): k.value for k in call.keywords}
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return found if found.keys() == {*places, *others} and len(call.args) <= len(places) and not starred else None


def _placed(function: ast.FunctionDef, given: Mapping[str, ast.expr], target: ast.expr | None) -> list[ast.stmt]:
    body = deepcopy(function.body)
    nodes = [n for s in body for n in ast.walk(s)]
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    returned = [n.value for n in nodes if isinstance(n, ast.Return)]
    plain = {n: v for n, v in given.items() if n not in stored and _is_simple(v)}
    results = {}
    if len(returned) == 1:
        parts, values = (n.elts if isinstance(n, ast.Tuple) else [n] for n in (target, returned[0]))
        pairs = zip(parts, values, strict=False) if len(parts) == len(values) else ()
        results = {v.id: part for part, v in pairs if part is not None and isinstance(v, ast.Name) and v.id in stored}
    rename = _Rename({**results, **plain}, target)
    own = [n for n in given if n not in plain]
    first: list[ast.stmt] = [ast.Assign([rename.visit(ast.Name(n, ast.Store()))], given[n]) for n in own]
    placed = [*first, *(part for statement in body if (part := rename.visit(statement)) is not None)]
    return [ast.fix_missing_locations(ast.copy_location(s, s if hasattr(s, "lineno") else body[-1])) for s in placed]


def _is_simple(node: ast.expr) -> bool:
    """Return whether an argument can stand in the place of its parameter: a name, or ``model.parameters()``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "parameters" in node.func.attr:
        return not (node.args or node.keywords)
    return isinstance(node, (ast.Name, ast.Attribute, ast.Constant))


class _Rename(ast.NodeTransformer):
    def __init__(self, new: Mapping[str, ast.expr], target: ast.expr | None) -> None:
        self.new, self.target = new, target

    def visit_Name(self, node: ast.Name) -> ast.expr:
        made = deepcopy(self.new.get(node.id, node))
        if isinstance(made, (ast.Name, ast.Attribute)):
            made.ctx = node.ctx
        return ast.copy_location(made, node)

    def visit_Return(self, node: ast.Return) -> ast.stmt | None:
        if node.value is None:
            return None
        value = self.visit(node.value)
        if self.target is None:
            return ast.copy_location(ast.Expr(value), node)
        same = ast.unparse(self.target) == ast.unparse(value)
        return None if same else ast.copy_location(ast.Assign([deepcopy(self.target)], value), node)
