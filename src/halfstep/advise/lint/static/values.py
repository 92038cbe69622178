"""Rules on values: arithmetic that leaves the range of a format, and what is low for certain.

The first rules find exponentials, logarithms, roots, masks and constants that no format can hold. The others follow
formats: a value is low if it comes from a product in a region whose format is known, or was made low by hand; casts,
views and elementwise operators keep its format, any other operator ends what is known.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from halfstep.advise.lint.rule import PATTERNS, WORDS, Hit, check_of
from halfstep.advise.lint.static.regions import Placed, all_sites, expressions, placed, value_at
from halfstep.advise.lint.static.script import Function, Script, argument, method, stored, targets, walked


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
            if text in tested and not PATTERNS["FIXED"].search(text):
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
        if isinstance(value, ast.Call) and PATTERNS["SQUARED_ERROR"].fullmatch(script.operator(value)):
            found = not any(k.arg == "reduction" and ast.unparse(k.value) == "'none'" for k in value.keywords)
        else:
            power = value_at(script, function, where, summed) if summed is not None else None
            found = (raised(script, power) or squared(script, power)) is not None
        if found:
            yield Hit(node.lineno, f"the root of `{ast.unparse(inner)}`, whose gradient at 0 is not finite")


def _in_a_loss(script: Script, function: Function, where: Placed) -> bool:
    """Return whether a statement's value reaches a backward pass, or the result of a forward or of a loss function."""
    name = getattr(function, "name", "")
    reached = name == "forward" or "loss" in name.lower()
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


PRODUCTS = PATTERNS["PRODUCTS"]
KEEPING = frozenset[str](WORDS["KEEPING"])
BY_INDEX = PATTERNS["BY_INDEX"]
LARGEST_FP16, LARGEST_FP32 = 65504.0, (2 - 2.0**-23) * 2.0**127
ROUNDS_TO_ZERO = 2.0**-25  # the largest number that fp16 rounds to 0: half of its smallest subnormal, 2**-24
ROUNDS_TO_ONE = {"fp16": 1 - 2.0**-12, "bf16": 1 - 2.0**-9}  # format -> the smallest number that it rounds to 1


class _Formats:
    """The formats of a function's values, statement by statement."""

    def __init__(self, script: Script, function: Function) -> None:
        self.script = script
        self.around = _around(script) if getattr(function, "name", "") == "forward" else ""
        own = any(where.place.regions for where in placed(script, function))
        self.alone = "autocast" not in script.text or (own and not self.around)  # no caller's region is around it
        self.known: dict[str, str] = {}
        self.sums: dict[str, int] = {}  # name of zeros -> the loops around them

    def low(self, where: Placed) -> str:
        """Return the format of the region around a statement; of a forward that is in none, of those that call it."""
        return where.place.low if where.place.regions else self.around

    def of(self, node: ast.AST, where: Placed) -> str:
        """Return "fp16" or "bf16" for an expression that has this format for certain, else ""."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, "")
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.MatMult):
                return self.low(where)
            if isinstance(node.op, ast.Pow):
                return self.of(node.left, where) if self.alone and not where.place.regions else ""
            sides = {self.of(side, where) for side in (node.left, node.right) if not self.script.is_number(side)}
            return sides.pop() if len(sides) == 1 else ""
        match node:
            case ast.Subscript(value=of) | ast.UnaryOp(operand=of) | ast.Attribute(value=of, attr="T" | "mT" | "data"):
                return self.of(of, where)
        if not isinstance(node, ast.Call):
            return ""
        called = self.script.called(node)
        of_torch = called.startswith("torch.")
        if PRODUCTS.fullmatch(called) or (method(node) in ("matmul", "mm", "bmm") and not of_torch):
            return self.low(where)
        if _ends_in_product(self.script, node):
            return self.low(where)
        if form := self.script.low_format(node):
            return form
        given = argument(node, None, "dtype")
        if PATTERNS["MAKING"].fullmatch(called):
            return form if (form := self.script.format_of(given)) in ("fp16", "bf16") else ""
        if method(node) in ("to", "type_as") and not of_torch and (node.args or given):
            like = given or node.args[0]
            return self.of(like.value if isinstance(like, ast.Attribute) and like.attr == "dtype" else like, where)
        keeping = KEEPING.union(WORDS["REDUCING"]) if self.alone and not where.place.regions else KEEPING
        if method(node) in keeping and isinstance(node.func, ast.Attribute):
            operands = node.args[:1] if of_torch else [node.func.value]
            return self.of(operands[0], where) if operands and given is None else ""
        return ""

    def note(self, where: Placed) -> None:
        statement = where.node
        if isinstance(statement, ast.Assign):
            parts = [pair for target in statement.targets for pair in _pairs(target, statement.value)]
            forms = {part.id: self.of(value, where) for part, value in parts if isinstance(part, ast.Name)}
            self.known |= dict.fromkeys(stored(*statement.targets), "") | forms
            zeros = [n for n in forms if PATTERNS["ZEROS"].fullmatch(self.script.called(statement.value))]
            self.sums |= dict.fromkeys(zeros, len(where.place.loops))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            self.known.pop(statement.target.id, None)


@lru_cache(maxsize=256)
def _around(script: Script) -> str:
    """Return the format of the regions in which a file calls all of its modules, as far as they are known; else ""."""
    called = [(s, script.called(s.call)) for s in all_sites(script) if getattr(s.function, "name", "") != "forward"]
    formats = {s.place.low for s, name in called if name in script.models or script.makers(name) & script.classes}
    return formats.pop() if len(formats) == 1 else ""


def _ends_in_product(script: Script, call: ast.Call, deep: int = 3) -> bool:
    made: ast.AST | None = script.constant(call.func)
    while method(made) in ("cuda", "to", "train"):
        made = made.func.value  # type: ignore[union-attr]  # it calls a method
    last = _last(script, name) if (name := script.called(made)) and deep else ()
    ends = bool(last) and all(isinstance(r, ast.Call) and _ends_in_product(script, r, deep - 1) for r in last)
    return ends or bool(re.fullmatch(r"torch\.nn\.(Linear|Bilinear|Conv\w+d)", name))


@lru_cache(maxsize=1024)
def _last(script: Script, name: str) -> tuple[ast.expr | None, ...]:
    classes = [n for n in walked(script.tree) if isinstance(n, ast.ClassDef) and n.name == name]
    forwards = [n for c in classes for n in c.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]
    return tuple(n.value for f in forwards for n in walked(f) if isinstance(n, ast.Return))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    elif isinstance(target, ast.Tuple):  # q, k, v = x.chunk(3)
        yield from ((part, value) for part in target.elts)
    else:
        yield target, value


def _number(script: Script, node: ast.expr | None) -> float | None:
    match script.constant(node):
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _number(script, operand)
            return None if value is None else -value
        case ast.BinOp(op=ast.Sub(), left=left, right=right):
            one, other = _number(script, left), _number(script, right)
            return None if one is None or other is None else one - other
        case ast.Attribute(value=ast.Call(args=[form]) as call, attr="min" | "max") if script.format_of(form) == "fp32":
            return LARGEST_FP32 if script.called(call) == "torch.finfo" else None
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
    return None


def _with_formats(script: Script) -> Iterator[tuple[_Formats, Placed, ast.expr | ast.stmt]]:
    """Yield statements and their expressions in the order of the source, with the formats known before them."""
    for function in script.functions if script.uses_torch else ():
        formats = _Formats(script, function)
        for where in placed(script, function):
            yield from ((formats, where, node) for node in walked(where.node) if isinstance(node, (ast.expr, ast.stmt)))
            formats.note(where)


@check_of("HS044")
def _large_fill(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        match node:
            case ast.Subscript() as filled if isinstance(where.node, ast.Assign) and node in where.node.targets:
                value = _number(script, where.node.value)
            case ast.Call(func=ast.Attribute(attr=("masked_fill" | "masked_fill_" | "fill_") as name, value=filled)):
                value = _number(script, argument(node, 0 if name == "fill_" else 1, "value"))
            case _:
                continue
        if value is not None and LARGEST_FP16 < abs(value) < float("inf") and formats.of(filled, where) == "fp16":
            yield Hit(node.lineno, f"{value:g} is filled into fp16 values, whose largest number is 65504")


@check_of("HS045")
def _lost_constant(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        match node:
            case ast.BinOp(op=ast.Add(), left=value, right=right):
                value, right = (value, right) if _number(script, value) is None else (right, value)
                low, high = _number(script, right), None
            case ast.Call(func=ast.Attribute(attr="clamp" | "clamp_min", value=value)):
                first = int(script.called(node).startswith("torch."))
                value = node.args[0] if first and node.args else value
                low, high = (_number(script, argument(node, first + i, name)) for i, name in enumerate(("min", "max")))
            case _:
                continue
        form = formats.of(value, where)
        if form == "fp16" and low is not None and 0 < low <= ROUNDS_TO_ZERO:
            yield Hit(node.lineno, f"{low:g} is 0 in fp16, the format of `{ast.unparse(value)}`")
        if form and high is not None and ROUNDS_TO_ONE[form] <= high < 1:
            yield Hit(node.lineno, f"{high:g} is 1 in {form}, the format of `{ast.unparse(value)}`")


@check_of("HS043")
def _low_squares(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        inner = operand(script, node, "mean", "sum")
        bare = formats.alone and not where.place.regions
        base = squared(script, inner) or (raised(script, inner) if bare else None)
        if base is not None and formats.of(base, where) == "fp16":
            yield Hit(node.lineno, f"`{ast.unparse(node)}` squares fp16 values")


def _loss(script: Script, node: ast.AST) -> str:
    name = script.operator(node) if isinstance(node, ast.Call) and node.args else ""
    return name if PATTERNS["LOSSES"].fullmatch(name) else ""


@check_of("HS046")
def _low_loss(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        outside = where.place.region is None and not where.place.no_grad and not formats.around
        name = _loss(script, node) if outside else ""
        if name and isinstance(node, ast.Call):
            operands = node.args[: 1 if BY_INDEX.fullmatch(name) else 2]
            form = formats.of(node.args[0], where)
            if form and all(formats.of(operand, where) == form for operand in operands):
                yield Hit(node.lineno, f"the loss is computed from {form} values, outside of a region")


@check_of("HS047")
def _loss_outside(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        outputs: dict[str, tuple[str, int]] = {}  # result of a model in a region -> its format, the region's line
        for where in placed(script, function):
            region, node = where.place.region, where.node
            for call in walked(node) if region is None and not where.place.no_grad else ():
                if isinstance(call, ast.Call) and BY_INDEX.fullmatch(_loss(script, call)):
                    first = call.args[0]
                    if isinstance(first, ast.Name) and first.id in outputs:
                        form, line = outputs[first.id]
                        what = f"`{first.id}` leaves the region of line {line} in {form}, and so does the loss of it"
                        yield Hit(call.lineno, what)
            for part in [part for target in targets(node) for part in walked(target)]:
                outputs.pop(part.id if isinstance(part, ast.Name) else "", None)
            match node:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value) if where.place.torch_region is not None:
                    if script.called(value) in script.models and where.place.low in ("fp16", "bf16"):
                        outputs[name] = where.place.low, where.place.torch_region.node.lineno


@check_of("HS062")
def _low_sum(script: Script) -> Iterator[Hit]:
    for formats, where, node in _with_formats(script):
        match node:
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()) if formats.known.get(name):
                if formats.sums.get(name, 99) < len(where.place.loops):
                    yield Hit(node.lineno, f"`{name}` sums up in {formats.known[name]}")


@check_of("HS068")
def _low_counts(script: Script) -> Iterator[Hit]:
    for function, where, node in expressions(script):
        made = getattr(getattr(node, "func", None), "value", None) if script.low_format(node) else node
        if isinstance(made, ast.Call) and script.called(made) == "torch.arange":
            form = script.low_format(node) or script.format_of(argument(made, None, "dtype"))
            text = " ".join(ast.unparse(value_at(script, function, where, end)) for end in made.args)
            if form in ("fp16", "bf16") and PATTERNS["LONG"].search(text):
                yield Hit(node.lineno, f"`{ast.unparse(made)}` is counted in {form}")
