"""Paths: the orders in which a function can make the calls of a training step.

Input: a `Script` and one of its functions. Output: its paths, each a tuple of `Op`s. A condition that is tested twice
has one truth on a path, a loop runs twice, and a name that is assigned anew is another object. What a rule reports must
hold on every path that reaches the place (`judged`), so a step that is right under some condition is never reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from halfstep.advise.lint.rule import Hit
from halfstep.advise.lint.static.regions import Place, blocks, entered
from halfstep.advise.lint.static.script import SCALERS, Function, Script, calls_in, walked

__all__ = ["BACKWARDS", "MANAGERS", "Op", "ends_window", "judged", "paths", "plain"]

LIMIT = 256
"""The most paths of a function; one with more is left undecided."""

FEW = 16
"""A loop with more paths than this runs once."""

CLIPPING = re.compile(r"torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm|value|norms?)?_?")
BACKWARDS = frozenset({"scaled_backward", "plain_backward", "managed_backward"})
METHODS = frozenset({"step", "update", "scale", "first_step", "second_step"})
MANAGERS = re.compile(r"(^|[._])(accelerator|fabric|engine|\w*engine|strategy|self|gm)$", re.IGNORECASE)
HARMLESS = re.compile(r"torch\.optim\.lr_scheduler\..*|print|len|isinstance|hasattr|getattr|type|id|float|str|.*log\w*")
VARYING = re.compile(r"[%<>]|==|!=|\(")
"""Conditions whose truth is another one in the next iteration of a loop."""


@dataclass(frozen=True, eq=False)
class Op:
    """One call that matters to a training step.

    Attributes:
        kind: "scaled_backward", "plain_backward" or "managed_backward"; "scale", "unscale", "scaler_step", "update" or
            "get_scale" of a scaler; "new_scaler"; "clip"; "step" of an optimizer; "zero"; "schedule"; "grads":
            gradients changed by hand; "read": a scaled loss's value on the host; "escape": another function may do
            anything with `scaler` or `target`; "iteration": a loop begins anew.
        call: where it is.
        place: what is around it.
        scaler: the scaler; "" if none takes part.
        target: the optimizer, scheduler or loss; of "clip" the source of what is clipped.
    """

    kind: str
    call: ast.AST
    place: Place
    scaler: str = ""
    target: str = ""


WINDOW = re.compile(r"%|accum|last|sync|boundary|window")


def ends_window(op: Op) -> bool:
    """Return whether an operation stands under a condition that is true in some micro-batches."""
    return any(isinstance(b, ast.If) and WINDOW.search(ast.unparse(b.test)) for b in op.place.branches)


def plain(key: str) -> str:
    """Return the name of an object without the mark of which assignment it comes from."""
    return key.partition("#")[0]


@dataclass
class _State:
    """A path up to a statement."""

    ops: tuple[Op, ...] = ()
    versions: dict[str, int] = field(default_factory=dict)
    scaled: dict[str, str] = field(default_factory=dict)
    known: dict[str, bool] = field(default_factory=dict)
    ended: str = ""  # "loop" behind a break or continue, "function" behind a return or raise

    def fork(self) -> _State:
        return _State(self.ops, dict(self.versions), dict(self.scaled), dict(self.known), self.ended)

    def identity(self) -> object:
        parts = (self.versions, self.scaled, self.known)
        return tuple(map(id, self.ops)), *(tuple(sorted(part.items())) for part in parts), self.ended


class _TooManyError(Exception):
    """A function has more paths than are looked at."""


@lru_cache(maxsize=1024)
def paths(script: Script, function: Function) -> tuple[tuple[Op, ...], ...]:
    """Return the paths of a function; none if there are too many."""
    if not script.uses_torch or not any(_relevant(script, statement) for statement in function.body):
        return ()
    place = Place()
    if not isinstance(function.node, ast.Module):
        for decorator in function.node.decorator_list:
            place = entered(script, place, decorator)
    try:
        return tuple(state.ops for state in _Walk(script).block(function.body, [_State()], place))
    except _TooManyError:
        return ()


def judged(script: Script, judge: Callable[[Sequence[Op]], Iterable[tuple[Op, str]]]) -> Iterator[Hit]:
    """Yield a hit for each operation that is wrong on every path on which it is judged.

    Args:
        script: the script.
        judge: yields the operations of a path on which a rule decides: with what is wrong, or with "" if it is right
            or cannot be known.
    """
    for function in script.functions:
        found: dict[ast.AST, set[str]] = {}
        for path in paths(script, function):
            verdicts: dict[ast.AST, str] = {}  # a call of a loop is judged in each iteration; one wrong one is enough
            for op, what in judge(path):
                verdicts[op.call] = verdicts.get(op.call) or what
            for call, what in verdicts.items():
                found.setdefault(call, set()).add(what)
        for call, whats in found.items():
            if "" not in whats:
                yield Hit(getattr(call, "lineno", 0), min(whats))


def _relevant(script: Script, node: ast.AST) -> bool:
    """Return whether a statement has a call of a training step, or one that is given a scaler or an optimizer."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return False
    keys = script.scalers.keys() | script.optimizers
    for call in calls_in(node):
        if isinstance(call.func, ast.Attribute):
            method, owner = call.func.attr, script.name(call.func.value)
            if method in ("backward", "zero_grad", "unscale_") or (method == "item" and script.keeps_scaled):
                return True
            if method in METHODS and (owner in keys or owner in script.schedulers):
                return True
        if CLIPPING.fullmatch(script.called(call)) or any(script.name(a) in keys for a in call.args):
            return True
    return any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in walked(node))


class _Walk:
    """The walk through the statements of one function."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.keys = script.scalers.keys() | script.optimizers

    def block(self, body: Sequence[ast.stmt], states: list[_State], place: Place) -> list[_State]:
        for statement in body:
            running = [state for state in states if not state.ended]
            if not running:
                break
            states = [state for state in states if state.ended] + self.statement(statement, running, place)
            unique = {state.identity(): state for state in states}
            states = list(unique.values())
            if len(states) > LIMIT:
                raise _TooManyError
        return states

    def statement(self, node: ast.stmt, states: list[_State], place: Place) -> list[_State]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return states
        if isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            for state in states:
                self.expression(node, state, place)
                state.ended = "loop" if isinstance(node, (ast.Break, ast.Continue)) else "function"
            return states
        if isinstance(node, ast.If):
            return self.choice(
                node.test, node.body, node.orelse, states, replace(place, branches=(*place.branches, node))
            )
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
            one, other = ([ast.copy_location(ast.Expr(part), node)] for part in (node.value.body, node.value.orelse))
            return self.choice(node.value.test, one, other, states, place)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self.loop(node, states, place)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                for state in states:
                    self.expression(item.context_expr, state, place)
                place = entered(self.script, place, item.context_expr)
            return self.block(node.body, states, place)
        if isinstance(node, ast.Match):
            return [s for case in node.cases for s in self.block(case.body, [s.fork() for s in states], place)] + states
        if inside := blocks(node):  # try: its handlers are not taken
            for part in [part for part in inside if not self.is_handler(node, part)]:
                states = self.block(part, states, place)
            return states
        for state in states:
            self.expression(node, state, place)
            self.assign(node, state)
        return states

    @staticmethod
    def is_handler(node: ast.stmt, part: list[ast.stmt]) -> bool:
        return any(part is handler.body for handler in getattr(node, "handlers", ()))

    def choice(
        self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], states: list[_State], place: Place
    ) -> list[_State]:
        """Take both branches of an if, as far as what is known of its condition allows it."""
        if not any(_relevant(self.script, statement) for statement in (*body, *orelse)):
            return states
        found = []
        for state in states:
            for truth, branch in ((True, body), (False, orelse)):
                taken = state.fork()
                if _assume(test, truth, taken.known):
                    found += self.block(branch, [taken], place)
        return found

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, states: list[_State], place: Place) -> list[_State]:
        """Run a loop's body twice; once if that makes many paths of it."""
        if not any(_relevant(self.script, statement) for statement in node.body):
            return states
        inner = replace(place, loops=(*place.loops, node))
        changed = {n.id for n in walked(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for number in range(2):
            if number and len(states) > FEW:
                break
            for state in states:
                if not state.ended:
                    state.ops += (Op("iteration", node, inner),)
                    self.vary(state, changed)
                    if not isinstance(node, ast.While):
                        self.rebind(node.target, state)
            states = self.block(node.body, states, inner)
            for state in states:
                state.ended = state.ended if state.ended == "function" else ""
                self.vary(state, changed)
            states = list({state.identity(): state for state in states}.values())
        return states

    @staticmethod
    def vary(state: _State, changed: set[str]) -> None:
        """Forget the conditions that may have another truth in the next iteration."""
        for text in [text for text in state.known if VARYING.search(text) or _names(text) & changed]:
            del state.known[text]

    # ------------------------------------------------------------------ expressions

    def expression(self, node: ast.AST, state: _State, place: Place) -> None:
        """Note the operations in a statement without blocks, or in an expression."""
        perhaps = {id(c) for n in walked(node) if isinstance(n, (ast.IfExp, ast.BoolOp)) for c in calls_in(n)}
        for call in calls_in(node):
            for op in self.operations(call, state, place):
                sure = id(call) not in perhaps or op.kind == "escape"
                state.ops += (op if sure else replace(op, kind="escape"),)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        if any(isinstance(n, ast.Attribute) and n.attr == "grad" for target in targets for n in walked(target)):
            none = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None
            state.ops += (Op("zero" if none else "grads", node, place),)

    def operations(self, call: ast.Call, state: _State, place: Place) -> Iterator[Op]:
        name = self.script.called(call)
        if CLIPPING.fullmatch(name):
            yield Op("clip", call, place, target=ast.unparse(call.args[0]) if call.args else "")
            return
        if name == "torch.autograd.backward":
            yield self.backward(call, call.args[0] if call.args else call, state, place)
            return
        if isinstance(call.func, ast.Attribute):
            method, owner = call.func.attr, self.script.name(call.func.value)
            key = self.versioned(owner, state)
            first = self.versioned(self.script.key(call.args[0]), state) if call.args else ""
            if owner in self.script.scalers:
                kinds = {"unscale_": "unscale", "step": "scaler_step"}
                kind = kinds.get(method, method)
                if kind in ("scale", "unscale", "scaler_step", "update", "get_scale"):
                    yield Op(kind, call, place, key, first)
                return
            if method == "backward":
                if call.args or MANAGERS.search(owner):
                    yield Op("managed_backward", call, place)
                else:
                    yield self.backward(call, call.func.value, state, place)
                return
            if owner in self.script.schedulers and method == "step":
                yield Op("schedule", call, place, target=key)
                return
            if owner in self.script.optimizers and method in ("step", "first_step", "second_step"):
                yield Op("step", call, place, target=key)
                return
            if method == "zero_grad":
                yield Op("zero", call, place, target=key)
                return
            if method.endswith("_") and any(
                isinstance(n, ast.Attribute) and n.attr == "grad" for n in walked(call.func)
            ):
                yield Op("grads", call, place)
                return
            if method in ("item", "tolist") and (scaler := state.scaled.get(owner)):
                yield Op("read", call, place, scaler, owner)
        yield from self.escapes(call, name, state, place)

    def backward(self, call: ast.Call, loss: ast.expr, state: _State, place: Place) -> Op:
        scaler = self.scaled_by(loss, state)
        return Op("scaled_backward" if scaler else "plain_backward", call, place, scaler, ast.unparse(loss))

    def scaled_by(self, node: ast.expr, state: _State) -> str:
        """Return the scaler by which a loss is scaled; "" if it is not."""
        for part in walked(node):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "scale":
                if (owner := self.script.name(part.func.value)) in self.script.scalers:
                    return self.versioned(owner, state)
            if isinstance(part, (ast.Name, ast.Attribute)) and (found := state.scaled.get(self.script.name(part))):
                return found
        return ""

    def escapes(self, call: ast.Call, name: str, state: _State, place: Place) -> Iterator[Op]:
        """Yield what a function may change: what it is given, and what a function of the file uses."""
        if HARMLESS.fullmatch(name):
            return
        given = {self.script.key(n) for a in (*call.args, *(k.value for k in call.keywords)) for n in _parts(a)}
        local = self.script.mentions.get(name.rpartition(".")[2], set())
        root = name.partition(".")[0]
        for key in self.keys:
            inside = key.startswith(f"{root}.") and name.count(".") == 1 and not local
            if key in given or key in local or inside or (root == "super" and key.startswith("self.")):
                versioned = self.versioned(key, state)
                scaler = versioned if key in self.script.scalers else ""
                yield Op("escape", call, place, scaler, "" if scaler else versioned)

    # ------------------------------------------------------------------ names

    def versioned(self, key: str, state: _State) -> str:
        """Return a key with a mark of which assignment of its names it comes from."""
        versions = [str(state.versions[word]) for word in re.findall(r"\w+", key) if word in state.versions]
        return f"{key}#{'.'.join(versions)}" if versions and key else key

    def assign(self, node: ast.stmt, state: _State) -> None:
        """Note what a statement assigns."""
        if isinstance(node, ast.AugAssign):
            self.forget({self.script.key(node.target)}, state)
            return
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            return
        scaler = self.scaled_by(value, state) if _is_arithmetic(value) else ""
        new = isinstance(value, ast.Call) and SCALERS.fullmatch(self.script.called(value))
        for target in targets:
            self.rebind(target, state)
            if scaler:
                state.scaled[self.script.key(target)] = scaler
            if new:
                key = self.versioned(self.script.key(target), state)
                state.ops += (Op("new_scaler", value, Place(), key),)

    def rebind(self, target: ast.expr, state: _State) -> None:
        keys = {self.script.key(n) for n in walked(target) if isinstance(n, (ast.Name, ast.Attribute))}
        stored = {n.id for n in walked(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name in stored:
            state.versions[name] = state.versions.get(name, 0) + 1
        for key in keys:
            state.scaled.pop(key, None)
        self.forget(keys, state)

    @staticmethod
    def forget(keys: set[str], state: _State) -> None:
        """Forget what was known of conditions with these names."""
        for text in [text for text in state.known if _names(text) & {key.rpartition(".")[2] for key in keys}]:
            del state.known[text]


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an argument, or the elements of one that is a list or a dict."""
    if isinstance(node, (ast.List, ast.Tuple)):
        yield from node.elts
    elif isinstance(node, ast.Dict):
        yield from node.values
    elif isinstance(node, ast.Starred):
        yield node.value
    else:
        yield node


def _is_arithmetic(node: ast.expr) -> bool:
    """Return whether a value is a loss if its parts are: a sum, a quotient or a scaled loss."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in ("scale", "mean", "sum")
    if isinstance(node, ast.BinOp):
        return _is_arithmetic(node.left) or _is_arithmetic(node.right)
    return isinstance(node, (ast.Name, ast.Attribute))


def _names(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _assume(test: ast.expr, truth: bool, known: dict[str, bool]) -> bool:
    """Note that a condition is `truth`; return False if that contradicts what is known."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _assume(test.operand, not truth, known)
    if isinstance(test, ast.Constant):
        return bool(test.value) is truth
    if isinstance(test, ast.BoolOp) and truth is isinstance(test.op, ast.And):
        return all(_assume(value, truth, known) for value in test.values)
    text = ast.unparse(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        if ast.unparse(test.comparators[0]) == "None":
            text, truth = f"{ast.unparse(test.left)} is None", truth is isinstance(test.ops[0], ast.Is)
            if truth and not _note(ast.unparse(test.left), False, known):
                return False
    elif truth and not _note(f"{text} is None", False, known):
        return False
    return _note(text, truth, known)


def _note(text: str, truth: bool, known: dict[str, bool]) -> bool:
    return known.setdefault(text, truth) is truth
