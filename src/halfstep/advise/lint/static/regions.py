"""Regions: which blocks of a script autocast, in which format, and the place of each call among them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from halfstep.advise.lint.rule import WORDS
from halfstep.advise.lint.static.script import Function, Script, argument, calls_in, stored, walked

DEVICES: dict[str, str] = WORDS["DEVICES"]
DEFAULTS = {"cuda": "fp16", "cpu": "bf16"}  # device type -> the format of torch.autocast without a dtype


@dataclass(frozen=True, eq=False)
class Region:
    """One autocast."""

    node: ast.Call  # that makes it
    library: str  # "torch" or "halfstep"
    device: str  # its type; "" if it is not a literal
    dtype: str  # "fp16", "bf16", "fp32"; "" if it is not known
    enabled: bool | None  # None if that depends on a value
    sure: bool = True  # not with ``ctx`` that may be a null context
    loops: int = 0  # around it

    @property
    def on(self) -> bool:
        """Whether operators of the block autocast for certain when training in mixed precision."""
        return self.enabled is not False and self.dtype != "fp32"


@dataclass(frozen=True)
class Place:
    """What is around a statement, from the outside in."""

    regions: tuple[Region, ...] = ()
    loops: tuple[ast.stmt, ...] = ()
    branches: tuple[tuple[ast.If, bool], ...] = ()  # each if with the truth of its condition there
    no_grad: bool = False

    @property
    def tests(self) -> list[str]:
        """The conditions of the branches."""
        return [ast.unparse(choice.test) for choice, _ in self.branches]

    @property
    def region(self) -> Region | None:
        """The innermost autocast if it is on, else None."""
        return self.regions[-1] if self.regions and self.regions[-1].on else None

    @property
    def torch_region(self) -> Region | None:
        """The innermost autocast if it is torch's and on, else None."""
        return self.region if self.region is not None and self.region.library == "torch" else None

    @property
    def low(self) -> str:
        """The format of the innermost autocast if it is on for certain, else ""."""
        return self.region.dtype if self.region is not None and self.region.sure and self.region.enabled else ""


@dataclass(frozen=True, eq=False)
class Site:
    """A call, where it stands, and the statement it is part of."""

    call: ast.Call
    place: Place
    statement: ast.stmt
    function: Function
    index: int  # in the function

    def precedes(self, other: Site) -> bool:
        """Return whether the call stands before another one."""
        if self.function is other.function:
            return self.index < other.index
        return self.call.lineno < other.call.lineno


def region_of(script: Script, node: ast.expr | None) -> Region | None:
    """Return the region that an expression makes, or None if it makes none."""
    node = script.constant(node)
    if isinstance(node, ast.IfExp):  # ``nullcontext() if cpu else autocast(...)``
        found = region_of(script, node.body) or region_of(script, node.orelse)
        return replace(found, sure=False) if found else None
    if not isinstance(node, ast.Call):
        return None
    name = script.called(node)
    if name not in DEVICES and name not in WORDS["ANY_DEVICE"]:
        return None
    first = script.constant(argument(node, 0, "device_type"))
    device = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
    device = DEVICES.get(name, device)
    dtype, enabled = argument(node, 1, "dtype"), argument(node, 0 if name in DEVICES else 2, "enabled")
    policy = argument(node, None, "policy")
    known = enabled.value if isinstance(enabled, ast.Constant) and isinstance(enabled.value, bool) else None
    library = "halfstep" if name.startswith("halfstep") else "torch"
    form = script.format_of(dtype) if dtype is not None else "" if policy is not None else DEFAULTS.get(device, "")
    return Region(node, library, device, form, True if enabled is None else known)


def entered(script: Script, place: Place, node: ast.expr) -> Place:
    """Return the place inside of a with block, or of a decorated function, that enters `node`."""
    if (region := region_of(script, node)) is not None:
        return replace(place, regions=(*place.regions, replace(region, loops=len(place.loops))))
    name = script.called(node) or script.name(node)
    no_grad = name in WORDS["NO_GRAD"] or (place.no_grad and name != "torch.enable_grad")
    return replace(place, no_grad=no_grad)


@dataclass(frozen=True, eq=False)
class Placed:
    """A statement without blocks, or the expression at the head of one with blocks, and its place."""

    node: ast.AST
    place: Place
    statement: ast.stmt


def place_of(script: Script, function: Function) -> Place:
    """Return the place of a function's statements, which its decorators enter."""
    place = Place()
    for decorator in getattr(function, "decorator_list", ()):
        place = entered(script, place, decorator)
    return place


@lru_cache(maxsize=4096)
def placed(script: Script, function: Function) -> tuple[Placed, ...]:
    """Return the statements of a function in the order of the source, without those of functions defined in it."""
    return tuple(_placed(script, function.body, place_of(script, function)))


def value_at(script: Script, function: Function, where: Placed, node: ast.expr) -> ast.expr:
    """Return `node`, or the value that it has at a statement if it is a name that is assigned before it for certain."""
    name = node.id if isinstance(node, ast.Name) else ""
    value, behind = None, False
    for each in placed(script, function) if name else ():
        behind = behind or each is where
        head = isinstance(each.statement, (ast.For, ast.AsyncFor)) and each.statement.target
        if name not in stored(each.node, *([head] if head else [])):
            continue
        around = [*each.place.loops, *each.place.branches]
        if not behind:
            sure = all(part in (*where.place.loops, *where.place.branches) for part in around)
            plain = isinstance(each.node, ast.Assign) and isinstance(each.node.targets[0], ast.Name)
            value = (each.node.value, each.place.loops) if sure and plain else None  # type: ignore[attr-defined]
        elif value is not None and any(loop in where.place.loops and loop not in value[1] for loop in each.place.loops):
            return node  # an iteration before may have assigned it
    return node if value is None else value[0]


def expressions(script: Script) -> Iterator[tuple[Function, Placed, ast.expr]]:
    """Yield the expressions of a file in the order of the source, if it uses torch, with function and statement."""
    for function in script.functions if script.uses_torch else ():
        for where in placed(script, function):
            yield from ((function, where, node) for node in walked(where.node) if isinstance(node, ast.expr))


@lru_cache(maxsize=4096)
def sites(script: Script, function: Function) -> tuple[Site, ...]:
    """Return the calls of a function in the order of the source, without those in functions defined in it."""
    found = [(call, p) for p in placed(script, function) for call in calls_in(p.node)]
    return tuple(Site(call, p.place, p.statement, function, index) for index, (call, p) in enumerate(found))


def all_sites(script: Script) -> Iterator[Site]:
    """Yield the calls of all functions of a file; none if it does not use torch."""
    for function in script.functions if script.uses_torch else ():
        yield from sites(script, function)


def in_torch_regions(script: Script) -> Iterator[tuple[Region, Site]]:
    """Yield the calls of a file in a region of torch that is on, with the region."""
    return ((region, site) for site in all_sites(script) if (region := site.place.torch_region) is not None)


def _placed(script: Script, body: list[ast.stmt], place: Place) -> Iterator[Placed]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        inner = place
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                yield Placed(item.context_expr, place, statement)
                inner = entered(script, inner, item.context_expr)
        elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            yield Placed(statement.test if isinstance(statement, ast.While) else statement.iter, place, statement)
            inner = replace(place, loops=(*place.loops, statement))
        elif isinstance(statement, ast.If):
            yield Placed(statement.test, place, statement)
            for truth, block in ((True, statement.body), (False, statement.orelse)):
                yield from _placed(script, block, replace(place, branches=(*place.branches, (statement, truth))))
            continue
        inside = blocks(statement)
        if not inside:
            yield Placed(statement, place, statement)
        for block in inside:
            yield from _placed(script, block, inner)


def blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a compound statement, in the order of the source."""
    found = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
    found[1:1] = [handler.body for handler in getattr(statement, "handlers", ())]
    found += [case.body for case in getattr(statement, "cases", ())]
    return [block for block in found if block]
