"""Paths: the orders in which a function can make the calls of a training step.

A condition that is tested twice has one truth on a path, a loop runs twice, and a name that is assigned anew is another
object. What a rule reports must hold on every path that reaches the place (`judged`), so a step that is right under
some condition is never reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from halfstep.advise.lint.rule import CHECKS, PATTERNS, WORDS, Hit
from halfstep.advise.lint.static.regions import Place, blocks, entered, place_of
from halfstep.advise.lint.static.script import SCALERS, Function, Script, calls_in, method, stored, targets, walked

CLIPPING = PATTERNS["CLIPPING"]
BACKWARDS = frozenset({"scaled_backward", "plain_backward", "managed_backward"})
MANAGERS = PATTERNS["MANAGERS"]
OF_SCALERS: dict[str, str] = WORDS["OF_SCALERS"]


@dataclass(frozen=True, eq=False)
class Op:
    """One call that matters to a training step.

    Its kind is "scaled_backward", "plain_backward" or "managed_backward"; "scale", "unscale", "scaler_step", "update"
    or "get_scale" of a scaler; "new_scaler"; "clip"; "step" of an optimizer; "zero"; "schedule"; "grads": gradients
    changed by hand; "grads_read": their size is taken; "read": a scaled loss's value on the host; "escape": another
    function may do anything with `scaler` or `target`; "iteration": a loop begins anew; "continue", "return".
    """

    kind: str
    call: ast.AST
    place: Place
    scaler: str = ""  # "" if none takes part
    target: str = ""  # the optimizer, scheduler or loss; of "clip" the source of what is clipped
    of: str = ""  # of "clip" the one optimizer that has the parameters, of "step" itself if made here; earlier scaler


def words(text: str) -> set[str]:
    """Return the names in a condition."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def plain(key: str) -> str:
    """Return the name of an object without the mark of which assignment it comes from."""
    return key.partition("#")[0]


@dataclass
class State:
    """A path up to a statement."""

    ops: tuple[Op, ...] = ()
    versions: dict[str, int] = field(default_factory=dict)
    scaled: dict[str, str] = field(default_factory=dict)  # loss -> its scaler; `PLAIN` if it has none for certain
    known: dict[str, bool] = field(default_factory=dict)
    ended: str = ""  # "loop" behind a break or continue, "function" behind a return or raise

    def fork(self) -> State:
        """Return a copy that goes on by itself."""
        return State(self.ops, dict(self.versions), dict(self.scaled), dict(self.known), self.ended)

    def identity(self) -> object:
        """Return what two states have in common that will have the same future."""
        parts = (self.versions, self.scaled, self.known)
        return tuple(map(id, self.ops)), *(tuple(sorted(part.items())) for part in parts), self.ended


PLAIN = "no scaler"
Verdicts = Iterator[tuple[Op, str]]
"""Operations of a path on which a rule decides: with what is wrong, or with "" if it is right or cannot be known."""

Judge = Callable[[Sequence[Op]], Verdicts]
VARYING = re.compile(r"[%<>]|==|!=|\(")  # conditions whose truth is another one in the next iteration of a loop
LIMIT = 256  # the most paths of a function; one with more is left undecided
FEW = 16  # a loop with more paths than this runs once


class _TooManyError(Exception):
    """A function has more paths than are looked at."""


@lru_cache(maxsize=1024)
def paths(script: Script, function: Function) -> tuple[tuple[Op, ...], ...]:
    """Return the paths of a function; none if there are too many."""
    walk, body = _Walk(script), function.body
    if not script.uses_torch or not any(map(walk.relevant, body)):
        return ()
    try:
        return tuple(state.ops for state in walk.block(body, [State()], place_of(script, function)))
    except _TooManyError:
        return ()


def on_paths(code: str, *, library: str = "") -> Callable[[Judge], Judge]:
    """Make the decorated judge of paths the check of the rule `code`; `library`: "torch" for torch's scalers alone."""

    def register(judge: Judge) -> Judge:
        CHECKS[code] = partial(judged, judge=judge, library=library)
        return judge

    return register


def judged(script: Script, judge: Judge, *, library: str = "") -> Iterator[Hit]:
    """Yield a hit for each operation that is wrong on every path on which it is judged."""
    for function in script.functions:
        found: dict[ast.AST, set[str]] = {}
        for path in paths(script, function):
            verdicts: dict[ast.AST, str] = {}  # a call of a loop is judged in each iteration; one wrong one is enough
            for op, what in judge(path):
                if library and script.scalers.get(plain(op.scaler)) != library:
                    continue
                verdicts[op.call] = verdicts.get(op.call) or what
            for call, what in verdicts.items():
                found.setdefault(call, set()).add(what)
        for call, whats in found.items():
            if "" not in whats:
                yield Hit(getattr(call, "lineno", 0), min(whats))


class _Walk:
    """The walk through the statements of one function: reads the operations of its script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.keys = script.scalers.keys() | script.optimizers

    def relevant(self, node: ast.AST) -> bool:
        """Return whether a statement has a call of a training step, or one that is given a scaler or an optimizer."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return False
        for call in calls_in(node):
            name, owner = method(call), self.script.owner(call)
            if name in ("backward", "zero_grad", "unscale_") or (self.script.keeps_scaled and _read(self.script, call)):
                return True
            known = owner in self.keys or owner in self.script.schedulers
            if known and name in ("step", "update", "scale", "first_step", "second_step"):
                return True
            if CLIPPING.fullmatch(self.script.called(call)) or any(self.script.name(a) in self.keys for a in call.args):
                return True
        return _has_grad(node)

    def expression(self, node: ast.AST, state: State, place: Place) -> None:
        perhaps = {id(c) for n in walked(node) if isinstance(n, (ast.IfExp, ast.BoolOp)) for c in calls_in(n)}
        for call in calls_in(node):
            for op in self._operations(call, state, place):
                sure = id(call) not in perhaps or op.kind == "escape"
                state.ops += (op if sure else replace(op, kind="escape"),)
        match node:
            case ast.Assign(value=value) if any(map(_has_grad, targets(node))):
                none = isinstance(value, ast.Constant) and value.value is None
                state.ops += (Op("zero" if none else "grads", node, place),)
            case ast.AugAssign(target=target) if _has_grad(target):
                state.ops += (Op("grads", node, place),)
            case ast.Assign() | ast.Expr() | ast.AugAssign() | ast.Return() if any(map(_takes_size, walked(node))):
                state.ops += (Op("grads_read", node, place),)

    def _operations(self, call: ast.Call, state: State, place: Place) -> Iterator[Op]:
        script, called, name, owner = self.script, self.script.called(call), method(call), self.script.owner(call)
        key = self._versioned(owner, state)
        first = call.args[0] if call.args else None
        if CLIPPING.fullmatch(called):
            of = script.optimizer_of.get(script.owner(first), "")
            yield Op("clip", call, place, target=ast.unparse(first) if first is not None else "", of=of)
        elif called == "torch.autograd.backward":
            yield self._backward(call, first or call, state, place)
        elif name and owner in script.scalers:
            if name in OF_SCALERS:
                target = self._versioned(script.key(first), state) if first is not None else ""
                twice = self._scaled_by(first, state) if name == "scale" and first is not None else ""
                yield Op(OF_SCALERS[name], call, place, key, target, twice)
        elif name == "backward" and (call.args or MANAGERS.search(owner)):
            yield Op("managed_backward", call, place)
        elif isinstance(call.func, ast.Attribute) and name == "backward":
            yield self._backward(call, call.func.value, state, place)
        elif name == "step" and owner in script.schedulers:
            yield Op("schedule", call, place, target=key)
        elif name in ("step", "first_step", "second_step") and owner in script.optimizers:
            made = any(map(PATTERNS["OPTIMIZERS"].fullmatch, script.makers(owner)))
            yield Op("step", call, place, target=key, of=owner if made else "")
        elif name == "zero_grad":
            yield Op("zero", call, place, target=key)
        elif name.endswith("_") and _has_grad(call if called.startswith("torch.") else call.func):
            yield Op("grads", call, place)
        elif (read := _read(script, call)) and (scaler := state.scaled.get(read, PLAIN)) != PLAIN:
            yield Op("read", call, place, scaler, read)
        else:
            yield from self._escapes(call, called, state, place)

    def _backward(self, call: ast.Call, loss: ast.expr, state: State, place: Place) -> Op:
        scaler = self._scaled_by(loss, state)
        known = state.scaled.get(self.script.name(loss), "") if not scaler else ""
        return Op("scaled_backward" if scaler else "plain_backward", call, place, scaler, ast.unparse(loss), known)

    def _scaled_by(self, node: ast.expr, state: State) -> str:
        for part in walked(node):
            if method(part) == "scale" and (owner := self.script.owner(part)) in self.script.scalers:
                return self._versioned(owner, state)
            found = state.scaled.get(self.script.name(part)) if isinstance(part, (ast.Name, ast.Attribute)) else ""
            if found and found != PLAIN:
                return found
        return ""

    def _escapes(self, call: ast.Call, name: str, state: State, place: Place) -> Iterator[Op]:
        """Yield what a function may change: what it is given, and what a function of the file uses."""
        if PATTERNS["HARMLESS"].fullmatch(name):
            return
        given = {self.script.key(n) for a in (*call.args, *(k.value for k in call.keywords)) for n in _parts(a)}
        model = name.rpartition(".")[0] in self.script.models  # model.train() is no function of the file
        local = self.script.mentions.get(name.rpartition(".")[2], set()) if not model else set[str]()
        root = name.partition(".")[0]
        of_root = name.count(".") == 1 and not local and name not in self.script.models  # self.net(x) is none
        for key in self.keys:
            inside = of_root and key.startswith(f"{root}.")
            if key in given or key in local or inside or (root == "super" and key.startswith("self.")):
                versioned = self._versioned(key, state)
                scaler = versioned if key in self.script.scalers else ""
                yield Op("escape", call, place, scaler, "" if scaler else versioned)

    def _versioned(self, key: str, state: State) -> str:
        """Return a key with a mark of which assignment of its names it comes from."""
        versions = [str(state.versions[word]) for word in re.findall(r"\w+", key) if word in state.versions]
        return f"{key}#{'.'.join(versions)}" if versions and key else key

    def assign(self, node: ast.stmt, state: State, place: Place) -> None:
        if isinstance(node, ast.AugAssign):
            self.forget({self.script.key(node.target).rpartition(".")[2]}, state)
            return
        value = getattr(node, "value", None)
        if not targets(node) or value is None:
            return
        scaler = self._scaled_by(value, state) if _is_arithmetic(value) else ""
        used = str([self.script.mentions.get(self.script.called(c).rpartition(".")[2]) for c in calls_in(node)])
        scaler = PLAIN if not scaler and place.region and ".scale'" not in used else scaler
        new = SCALERS.fullmatch(self.script.called(value))
        for target in targets(node):
            self.rebind(target, state)
            if scaler:
                state.scaled[self.script.key(target)] = scaler
            if new:
                key = self._versioned(self.script.key(target), state)
                state.ops += (Op("new_scaler", value, Place(), key),)

    def rebind(self, target: ast.expr, state: State) -> None:
        keys = {self.script.key(n) for n in walked(target) if isinstance(n, (ast.Name, ast.Attribute))}
        for name in stored(target):
            state.versions[name] = state.versions.get(name, 0) + 1
        for key in keys:
            state.scaled.pop(key, None)
        self.forget({key.rpartition(".")[2] for key in keys}, state)

    @staticmethod
    def forget(names: set[str], state: State, varying: bool = False) -> None:
        """Forget what was known of conditions with these names, and of those that are `VARYING`."""
        for text in list(state.known):
            if words(text) & names or (varying and VARYING.search(text)):
                del state.known[text]

    def block(self, body: Sequence[ast.stmt], states: list[State], place: Place) -> list[State]:
        for statement in body:
            running = [state for state in states if not state.ended]
            if not running:
                break
            states = [state for state in states if state.ended] + self.statement(statement, running, place)
            states = list({state.identity(): state for state in states}.values())
            if len(states) > LIMIT:
                raise _TooManyError
        return states

    def statement(self, node: ast.stmt, states: list[State], place: Place) -> list[State]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return states
        if isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            for state in states:
                self.expression(node, state, place)
                if isinstance(node, (ast.Continue, ast.Return)):
                    state.ops += (Op(type(node).__name__.lower(), node, place),)
                state.ended = "loop" if isinstance(node, (ast.Break, ast.Continue)) else "function"
            return states
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
            one, other = (ast.copy_location(ast.Expr(part), node) for part in (node.value.body, node.value.orelse))
            node = ast.If(node.value.test, [one], [other])
        if isinstance(node, ast.If):
            return self.choice(node, states, place)
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
        if blocks(node):  # try: its handlers are not taken
            for field in ("body", "orelse", "finalbody"):
                states = self.block(getattr(node, field, []), states, place)
            return states
        for state in states:
            self.expression(node, state, place)
            self.assign(node, state, place)
        return states

    def choice(self, node: ast.If, states: list[State], place: Place) -> list[State]:
        order = [op.kind for op in states[0].ops if op.kind in ("unscale", "scaler_step", "update")]
        left = order[-1:] == ["unscale"] and any(isinstance(s, (ast.Return, ast.Continue)) for s in node.body[-1:])
        if not left and not any(self.relevant(statement) for statement in (*node.body, *node.orelse)):
            return states
        found = []
        for state in states:
            for truth, branch in ((True, node.body), (False, node.orelse)):
                taken = state.fork()
                if assume(node.test, truth, taken.known):
                    found += self.block(branch, [taken], replace(place, branches=(*place.branches, (node, truth))))
        return found

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, states: list[State], place: Place) -> list[State]:
        """Run a loop's body twice; once if that makes many paths of it."""
        if not any(self.relevant(statement) for statement in node.body):
            return states
        inner = replace(place, loops=(*place.loops, node))
        changed = stored(node)
        for number in range(2):
            if number and len(states) > FEW:
                break
            for state in states:
                if not state.ended:
                    state.ops += (Op("iteration", node, inner),)
                    self.forget(changed, state, varying=True)
                    if not isinstance(node, ast.While):
                        self.rebind(node.target, state)
            states = self.block(node.body, states, inner)
            for state in states:
                state.ended = state.ended if state.ended == "function" else ""
                self.forget(changed, state, varying=True)
            states = list({state.identity(): state for state in states}.values())
        return states


def _has_grad(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in walked(node))


def _read(script: Script, call: ast.Call) -> str:
    """Return what a call takes the value of, outside of the graph: ``loss.item()``, ``float(loss)``; "" if nothing."""
    if method(call) in ("item", "tolist", "detach", "cpu", "numpy"):
        return script.owner(call)
    return script.name(call.args[0]) if script.called(call) in ("float", "print") and call.args else ""


def _takes_size(node: ast.AST) -> bool:
    """Return whether a call takes the size of a gradient: ``p.grad.norm()``."""
    return method(node) in WORDS["SIZES"] and _has_grad(node) and not re.search("is(finite|nan|inf)", ast.unparse(node))


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Dict(values=parts):
            yield from parts
        case _:
            yield node.value if isinstance(node, ast.Starred) else node


def _is_arithmetic(node: ast.expr) -> bool:
    """Return whether a value is a loss if its parts are: a sum, a quotient or a scaled loss."""
    if isinstance(node, ast.Call):
        return method(node) in ("scale", "mean", "sum")
    if isinstance(node, ast.BinOp):
        return _is_arithmetic(node.left) or _is_arithmetic(node.right)
    return isinstance(node, (ast.Name, ast.Attribute))


def assume(test: ast.expr, truth: bool, known: dict[str, bool]) -> bool:
    """Note that a condition is `truth`; return False if that contradicts what is known."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return assume(test.operand, not truth, known)
    if isinstance(test, ast.Constant):
        return bool(test.value) is truth
    if isinstance(test, ast.BoolOp) and truth is isinstance(test.op, ast.And):
        return all(assume(value, truth, known) for value in test.values)
    text = ast.unparse(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        if ast.unparse(test.comparators[0]) == "None":
            text, truth = f"{ast.unparse(test.left)} is None", truth is isinstance(test.ops[0], ast.Is)
            if truth and known.setdefault(ast.unparse(test.left), False):
                return False
    elif truth and known.setdefault(f"{text} is None", False):
        return False
    return known.setdefault(text, truth) is truth
