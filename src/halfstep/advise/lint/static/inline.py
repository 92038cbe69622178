"""Functions of a file put in the place of their calls, so that rules see one training step in one function.

``model, optimizer = make()`` becomes the statements of `make` with the names of its results, and a parameter becomes
the argument; lines stay those of the function. This is done with functions that are defined once, return at their end
alone, and are called as a statement or for the value of an assignment.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from copy import deepcopy

DEPTH = 3
"""Functions in functions that are followed."""

MOST_NODES = 8000
"""Nodes of the syntax tree of a function that is put in place."""

ODD = (
    ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda,
    ast.Return,
)  # fmt: skip
"""What a function that is put in place does not have, but for a return at its end."""


def inlined(tree: ast.Module) -> ast.Module:
    """Return the tree with calls of its own plain functions replaced by their statements."""
    tree.body = [part for statement in tree.body for part in _unguarded(statement)]
    every = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [node.name for node in every]
    plain = {
        n.name: n for n in tree.body if isinstance(n, ast.FunctionDef) and names.count(n.name) == 1 if _is_plain(n)
    }
    walk = _Inliner(plain)
    for node in every:
        node.body = walk.block(node.body, {node.name})
    tree.body = walk.block(tree.body, set())
    gone = walk.done - {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    tree.body = [s for s in tree.body if not (isinstance(s, ast.FunctionDef) and s.name in gone)]
    return tree


def _unguarded(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements under ``if __name__ == "__main__"``, which is no condition of a step."""
    guard = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    return statement.body if guard and isinstance(statement, ast.If) else [statement]


def _is_plain(node: ast.FunctionDef) -> bool:
    last = node.body[-1]
    inner = [n for statement in node.body for n in ast.walk(statement) if n is not last]
    odd = node.args.vararg or node.args.kwarg or node.decorator_list or any(isinstance(n, ODD) for n in inner)
    return not odd and len(inner) <= MOST_NODES


class _Inliner:
    """Replaces calls; `done` has the functions that were put in place."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions, self.done = functions, set[str]()

    def block(self, body: list[ast.stmt], inside: set[str]) -> list[ast.stmt]:
        """Return the statements of a block with calls replaced; `inside`: the functions that it is part of."""
        for statement in body:
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                for field in ("body", "orelse", "finalbody"):
                    if part := getattr(statement, field, None):
                        setattr(statement, field, self.block(part, inside))
        return [part for statement in body for part in self._replaced(statement, inside)]

    def _replaced(self, statement: ast.stmt, inside: set[str]) -> list[ast.stmt]:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call):
                target = None
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=name)) as call):
                pass
            case _:
                return [statement]
        function = self.functions.get(name) if name not in inside and len(inside) <= DEPTH else None
        given = _given(function.args, call) if function is not None else None
        if function is None or given is None:
            return [statement]
        self.done.add(name)
        return self.block(_placed(function, given, target), {*inside, name})


def _given(declared: ast.arguments, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return parameter -> argument or default; None if that is not known."""
    places = [p.arg for p in (*declared.posonlyargs, *declared.args)]
    others = [p.arg for p in declared.kwonlyargs]
    found = dict(zip(reversed(places), reversed(declared.defaults), strict=False))
    found |= {name: value for name, value in zip(others, declared.kw_defaults, strict=True) if value is not None}
    found |= dict(zip(places, call.args, strict=False)) | {str(k.arg): k.value for k in call.keywords}
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return found if found.keys() == {*places, *others} and len(call.args) <= len(places) and not starred else None


def _placed(function: ast.FunctionDef, given: Mapping[str, ast.expr], target: ast.expr | None) -> list[ast.stmt]:
    """Return the statements of a function with its arguments, and its result in `target`."""
    *body, last = deepcopy(function.body)
    result = last.value if isinstance(last, ast.Return) else None
    body += [] if isinstance(last, ast.Return) else [last]
    stored = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    plain = {
        n: v for n, v in given.items() if n not in stored and isinstance(v, (ast.Name, ast.Attribute, ast.Constant))
    }
    parts, values = (n.elts if isinstance(n, ast.Tuple) else [n] for n in (target, result))
    pairs = zip(parts, values, strict=False) if len(parts) == len(values) else ()
    results = {v.id: part for part, v in pairs if part is not None and isinstance(v, ast.Name) and v.id in stored}
    rename = _Rename({**results, **plain})
    own = [n for n in given if n not in plain]
    first: list[ast.stmt] = [ast.Assign([rename.visit(ast.Name(n, ast.Store()))], given[n]) for n in own]
    placed = [*first, *(rename.visit(statement) for statement in body)]
    if result is not None:
        value = rename.visit(result)
        if target is None or ast.unparse(target) != ast.unparse(value):
            placed.append(ast.Expr(value) if target is None else ast.Assign([target], value))
    return [ast.fix_missing_locations(ast.copy_location(s, s if hasattr(s, "lineno") else last)) for s in placed]


class _Rename(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, new: Mapping[str, ast.expr]) -> None:
        self.new = new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what stands for a name."""
        made = deepcopy(self.new.get(node.id, node))
        if isinstance(made, (ast.Name, ast.Attribute)):
            made.ctx = node.ctx
        return ast.copy_location(made, node)
