"""Functions of a file put in the place of their calls, so that rules see one training step in one function.

``model, optimizer = make()`` becomes the statements of `make`, with the names of its results; a parameter becomes the
argument. Lines stay those of the function. A function is put in place if all its calls allow it: it is defined once,
returns at its end alone, and is called as a statement or for the value of an assignment.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy

DEPTH = 3
"""Functions in functions that are followed."""

LONGEST = 200
"""Statements of a function that is put in place, with those in its own."""

Defined = ast.FunctionDef


def inlined(tree: ast.Module) -> ast.Module:
    """Return the tree with calls of its own plain functions replaced by their statements."""
    every = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [node.name for node in every]
    plain = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and names.count(node.name) == 1}
    plain = {name: node for name, node in plain.items() if _is_plain(node)}
    if not plain:
        return tree
    walk = _Inliner(plain)
    for node in every:
        node.body = walk.block(node.body, {node.name})
    tree.body = walk.block(tree.body, set())
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    tree.body = [s for s in tree.body if not (isinstance(s, Defined) and s.name in walk.done - mentioned)]
    return tree


def _is_plain(node: ast.FunctionDef) -> bool:
    """Return whether a function has named parameters, no decorators and no return but at its end."""
    every = node.args
    inner = [n for statement in node.body for n in ast.walk(statement)]
    last = node.body[-1]
    returns = [n for n in inner if isinstance(n, ast.Return)]
    odd = (ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return not (
        every.vararg or every.kwarg or node.decorator_list or any(isinstance(n, odd) for n in inner)
        or len(inner) > 40 * LONGEST or [n for n in returns if n is not last]
    )  # fmt: skip


class _Inliner:
    """Replaces calls; `done` has the functions that were put in place."""

    def __init__(self, functions: dict[str, ast.FunctionDef]) -> None:
        self.functions, self.done = functions, set[str]()

    def block(self, body: list[ast.stmt], inside: set[str]) -> list[ast.stmt]:
        """Return the statements of a block with calls replaced; `inside`: the functions that it is part of."""
        found: list[ast.stmt] = []
        for statement in body:
            for field in ("body", "orelse", "finalbody"):
                if isinstance(part := getattr(statement, field, None), list) and not _defines(statement):
                    setattr(statement, field, self.block(part, inside))
            found += self._replaced(statement, inside)
        return found

    def _replaced(self, statement: ast.stmt, inside: set[str]) -> list[ast.stmt]:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call):
                target = None
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=name)) as call):
                pass
            case _:
                return [statement]
        function = self.functions.get(name)
        if function is None or name in inside or len(inside) > DEPTH:
            return [statement]
        given = _given(function, call)
        if given is None:
            return [statement]
        self.done.add(name)
        return self.block(_placed(function, given, target), {*inside, name})


def _defines(node: ast.stmt) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def _given(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return parameter -> argument or default; None if that is not known."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    if len(call.args) > len(parameters) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    found = dict(zip([p.arg for p in reversed(parameters)], reversed(function.args.defaults), strict=False))
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    found |= {p.arg: default for p, default in keywords if default is not None}
    found |= {p.arg: value for p, value in zip(parameters, call.args, strict=False)}
    found |= {k.arg: k.value for k in call.keywords if k.arg is not None}
    wanted = {p.arg for p in (*parameters, *function.args.kwonlyargs)}
    return found if found.keys() == wanted and all(k.arg for k in call.keywords) else None


def _placed(function: ast.FunctionDef, given: dict[str, ast.expr], target: ast.expr | None) -> list[ast.stmt]:
    """Return the statements of a function with its arguments, and its result in `target`."""
    body = deepcopy(function.body)
    stored = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    end = body.pop() if isinstance(body[-1], ast.Return) else None
    result = end.value if isinstance(end, ast.Return) else None
    new: dict[str, ast.expr] = {}
    for part, value in _pairs(target, result):
        if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(value, ast.Name) and value.id in stored:
            new.setdefault(value.id, part)
    first = [
        ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), function.body[0])
        for name, value in given.items()
        if name in stored or not isinstance(value, (ast.Name, ast.Attribute, ast.Constant))
    ]
    assigned = {node.targets[0].id for node in first if isinstance(node.targets[0], ast.Name)}
    new |= {name: value for name, value in given.items() if name not in assigned and name not in new}
    rename = _Rename(new)
    placed = [*first, *(rename.visit(statement) for statement in body)]
    if result is not None:
        value = rename.visit(result)
        last: ast.stmt = ast.Expr(value) if target is None else ast.Assign([target], value)
        if not (target is not None and ast.unparse(target) == ast.unparse(value)):
            placed.append(ast.copy_location(last, end or function))
    return [ast.fix_missing_locations(statement) for statement in placed]


def _pairs(target: ast.expr | None, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the parts of a target with the parts of the value that it is assigned."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    elif target is not None and value is not None:
        yield target, value


class _Rename(ast.NodeTransformer):
    """Puts expressions in the place of names."""

    def __init__(self, new: dict[str, ast.expr]) -> None:
        self.new = new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return what stands for a name."""
        if node.id not in self.new:
            return node
        made = deepcopy(self.new[node.id])
        if isinstance(made, (ast.Name, ast.Attribute)):
            made.ctx = node.ctx
        return ast.copy_location(made, node)
