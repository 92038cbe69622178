"""Rules on arithmetic that leaves the range of a format: exponentials, logarithms, roots, masks, small constants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.regions import Placed, expressions, placed, value_at
from halfstep.advise.lint.static.script import Function, Script, method, targets, walked

SQUARED_ERROR = re.compile(r"torch\.nn\.(functional\.mse_loss|MSELoss)")
FIXED = re.compile(r"target|label|\bgt\b|_gt|gt_|true|\by\b|mask|count|weight")
"""Names of values that have no gradient."""


def _differentiated(script: Script) -> Iterator[tuple[Function, Placed, ast.expr]]:
    return (found for found in expressions(script) if not found[1].place.no_grad)


def operand(script: Script, node: ast.AST | None, *names: str) -> ast.expr | None:
    """Return x of ``torch.name(x)`` or ``x.name()``, for one of these names; None for other expressions."""
    if isinstance(node, ast.Call):
        called = script.called(node)
        if called.removeprefix("torch.nn.functional.").removeprefix("torch.") in names and called.startswith("torch."):
            return node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute) and node.func.attr in names:
            return None if called.startswith(("torch.", "numpy.", "math.")) else node.func.value
    return None


@check_of("HS039")
def _softmax_by_hand(script: Script) -> Iterator[Hit]:
    for function, where, node in _differentiated(script):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        summed = operand(script, node.right, "sum")
        power = operand(script, value_at(script, function, where, node.left), "exp")
        if summed is None or power is None or ast.unparse(summed) != ast.unparse(node.left):
            continue
        power = value_at(script, function, where, power)
        bounded = isinstance(power, ast.UnaryOp) or "max" in ast.unparse(power) or "norm" in ast.unparse(power)
        if not bounded and not (isinstance(power, ast.BinOp) and isinstance(power.op, ast.Sub)):
            yield Hit(node.lineno, f"exp of `{ast.unparse(power)}`, divided by its sum, with no maximum subtracted")


@check_of("HS040")
def _log_of_probability(script: Script) -> Iterator[Hit]:
    for function, where, node in _differentiated(script):
        inner = operand(script, node, "log")
        value = value_at(script, function, where, inner) if inner is not None else None
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub) and ast.unparse(value.left) in ("1", "1.0"):
            value = value_at(script, function, where, value.right)
            if operand(script, value, "sigmoid") is None:
                continue
        for name in ("softmax", "sigmoid"):
            if value is not None and operand(script, value, name) is not None:
                yield Hit(node.lineno, f"the logarithm of a {name}, which is 0 where its input is far below 0")


@check_of("HS041")
def _mask_times_inf(script: Script) -> Iterator[Hit]:
    for _, _, node in expressions(script):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for mask, other in ((node.left, node.right), (node.right, node.left)):
                if _is_infinite(script, other) and _has_zeros(script, mask):
                    yield Hit(node.lineno, f"`{ast.unparse(node)}` is NaN where the mask is 0")


def _is_infinite(script: Script, node: ast.expr) -> bool:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=negated):
            return _is_infinite(script, negated)
        case ast.Call(args=[ast.Constant(value=value), *_]) if script.called(node) == "float":
            return str(value).strip("+-").lower() in ("inf", "infinity")
    return script.name(node) in ("math.inf", "numpy.inf", "torch.inf")


def _has_zeros(script: Script, node: ast.expr) -> bool:
    """Return whether an expression is a mask: some of its elements are 0."""
    if isinstance(node, (ast.Compare, ast.UnaryOp)):
        return isinstance(node, ast.Compare) or isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Sub) and ast.unparse(node.left) in ("1", "1.0")
    if isinstance(node, ast.Call):
        if operand(script, node, "triu", "tril") is not None:
            return not any(_is_infinite(script, n) for n in walked(node) if isinstance(n, ast.expr))
        cast = method(node) in ("float", "to", "type_as", "int", "bool", "half")
        return cast and isinstance(node.func, ast.Attribute) and _has_zeros(script, node.func.value)
    return "mask" in script.name(node).lower()


@check_of("HS050")
def _hidden(script: Script) -> Iterator[Hit]:
    for function, where, node in _differentiated(script):
        args = node.args if isinstance(node, ast.Call) and script.called(node) == "torch.where" else []
        if len(args) != 3 or not _in_a_loss(script, function, where):
            continue
        tested = {ast.unparse(n) for n in walked(args[0]) if isinstance(n, (ast.Name, ast.Attribute))}
        for inner in [n for branch in args[1:] for n in walked(branch)]:
            value = operand(script, inner, "log", "sqrt", "rsqrt")
            text = ast.unparse(value) if value is not None else ""
            if text in tested and not FIXED.search(text):
                what = f"the gradient of `{ast.unparse(inner)}` is not finite where torch.where hides it"
                yield Hit(node.lineno, what)


@check_of("HS042")
def _root_at_zero(script: Script) -> Iterator[Hit]:
    for function, where, node in _differentiated(script):
        inner = operand(script, node, "sqrt")
        if inner is None and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            inner = node.left if ast.unparse(node.right) in ("0.5", "1 / 2") else None
        if inner is None or not _in_a_loss(script, function, where):
            continue
        value = value_at(script, function, where, inner)
        summed = operand(script, value, "sum", "mean")
        if isinstance(value, ast.Call) and SQUARED_ERROR.fullmatch(script.operator(value)):
            found = not any(k.arg == "reduction" and ast.unparse(k.value) == "'none'" for k in value.keywords)
        else:
            power = value_at(script, function, where, summed) if summed is not None else None
            found = (raised(script, power) or squared(script, power)) is not None
        if found:
            yield Hit(node.lineno, f"the root of `{ast.unparse(inner)}`, whose gradient at 0 is not finite")


def _in_a_loss(script: Script, function: Function, where: Placed) -> bool:
    """Return whether a statement's value reaches a backward pass, or the result of a forward or of a loss function."""
    reached = function.name == "forward" or "loss" in function.name.lower()
    if isinstance(where.statement, ast.Return):
        return reached
    names = {t.id for t in getattr(where.statement, "targets", ()) if isinstance(t, ast.Name)}
    every = placed(script, function)
    for each in every[every.index(where) + 1 :]:
        if isinstance(each.statement, ast.Return) and reached and names & _differentiable(each.statement):
            return True
        for node in walked(each.node):
            match node:
                case ast.Call(func=ast.Attribute(attr="backward", value=loss)) if names & _differentiable(loss):
                    return True
        if isinstance(each.node, (ast.Assign, ast.AugAssign)) and names & _differentiable(each.node.value):
            names |= {t.id for t in targets(each.node) if isinstance(t, ast.Name)}
    return False


def _differentiable(node: ast.AST) -> set[str]:
    """Return the names through which an expression has gradients: not those in comparisons or behind .item()."""
    if isinstance(node, ast.Compare) or method(node) in ("item", "detach", "numpy", "tolist", "argmax"):
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return set().union(*map(_differentiable, ast.iter_child_nodes(node)))


def squared(script: Script, node: ast.expr | None) -> ast.expr | None:
    """Return x of ``x * x`` or ``square(x)``; None for other expressions."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return node.left if ast.unparse(node.left) == ast.unparse(node.right) else None
    return operand(script, node, "square")


def raised(script: Script, node: ast.expr | None) -> ast.expr | None:
    """Return x of ``x ** 2`` or ``pow(x, 2)``, which autocast computes in fp32; None for other expressions."""
    match node:
        case ast.Call(args=[*_, exponent]) if ast.unparse(exponent) in ("2", "2.0"):
            return operand(script, node, "pow")
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent) if ast.unparse(exponent) in ("2", "2.0"):
            return base
    return None
