"""Operations: the calls of a script that matter to a training step, and what a path knows of its objects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from halfstep.advise.lint.static.regions import Place
from halfstep.advise.lint.static.script import SCALERS, Script, calls_in, method, stored, walked

CLIPPING = re.compile(r"torch\.nn\.utils\.(clip_grad\.)?clip_grad_(norm|value|norms?)?_?")
BACKWARDS = frozenset({"scaled_backward", "plain_backward", "managed_backward"})
METHODS = frozenset({"step", "update", "scale", "first_step", "second_step"})
MANAGERS = re.compile(r"(^|[._])(accelerator|fabric|engine|\w*engine|strategy|self|gm)$", re.IGNORECASE)
OF_SCALERS = {"unscale_": "unscale", "step": "scaler_step"}
HARMLESS = re.compile(r"torch\.optim\.lr_scheduler\..*|print|len|isinstance|hasattr|getattr|type|id|float|str|.*log\w*")


@dataclass(frozen=True, eq=False)
class Op:
    """One call that matters to a training step.

    Its kind is "scaled_backward", "plain_backward" or "managed_backward"; "scale", "unscale", "scaler_step", "update"
    or "get_scale" of a scaler; "new_scaler"; "clip"; "step" of an optimizer; "zero"; "schedule"; "grads": gradients
    changed by hand; "read": a scaled loss's value on the host; "escape": another function may do anything with `scaler`
    or `target`; "iteration": a loop begins anew.
    """

    kind: str
    call: ast.AST
    place: Place
    scaler: str = ""  # "" if none takes part
    target: str = ""  # the optimizer, scheduler or loss; of "clip" the source of what is clipped


def words(text: str) -> set[str]:
    """Return the names in a condition."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


WINDOW = re.compile(r"%|accum|last|sync|boundary|window")


def ends_window(op: Op) -> bool:
    """Return whether an operation stands under a condition that is true in some micro-batches."""
    return any(WINDOW.search(ast.unparse(choice.test)) for choice, _ in op.place.branches)


def in_each(op: Op, backward: Op) -> bool:
    """Return whether an operation runs in every iteration with that backward pass, or in none of them."""
    varying = stored(*op.place.loops[-1:])
    more = [branch for branch in op.place.branches if branch not in backward.place.branches]
    tests = [ast.unparse(choice.test) for choice, _ in more]
    return not any("%" in test or "(" in test or words(test) & varying for test in tests)


def plain(key: str) -> str:
    """Return the name of an object without the mark of which assignment it comes from."""
    return key.partition("#")[0]


@dataclass
class State:
    """A path up to a statement."""

    ops: tuple[Op, ...] = ()
    versions: dict[str, int] = field(default_factory=dict)
    scaled: dict[str, str] = field(default_factory=dict)
    known: dict[str, bool] = field(default_factory=dict)
    ended: str = ""  # "loop" behind a break or continue, "function" behind a return or raise

    def fork(self) -> State:
        """Return a copy that goes on by itself."""
        return State(self.ops, dict(self.versions), dict(self.scaled), dict(self.known), self.ended)

    def identity(self) -> object:
        """Return what two states have in common that will have the same future."""
        parts = (self.versions, self.scaled, self.known)
        return tuple(map(id, self.ops)), *(tuple(sorted(part.items())) for part in parts), self.ended


class Operations:
    """Reads the operations of one script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.keys = script.scalers.keys() | script.optimizers

    def relevant(self, node: ast.AST) -> bool:
        """Return whether a statement has a call of a training step, or one that is given a scaler or an optimizer."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            return False
        for call in calls_in(node):
            name, owner = method(call), self.script.owner(call)
            if name in ("backward", "zero_grad", "unscale_") or (name == "item" and self.script.keeps_scaled):
                return True
            if name in METHODS and (owner in self.keys or owner in self.script.schedulers):
                return True
            if CLIPPING.fullmatch(self.script.called(call)) or any(self.script.name(a) in self.keys for a in call.args):
                return True
        return _has_grad(node)

    def expression(self, node: ast.AST, state: State, place: Place) -> None:
        """Note the operations in a statement without blocks, or in an expression."""
        perhaps = {id(c) for n in walked(node) if isinstance(n, (ast.IfExp, ast.BoolOp)) for c in calls_in(n)}
        for call in calls_in(node):
            for op in self._operations(call, state, place):
                sure = id(call) not in perhaps or op.kind == "escape"
                state.ops += (op if sure else replace(op, kind="escape"),)
        match node:
            case ast.Assign(targets=targets, value=ast.Constant(value=None)) if any(map(_has_grad, targets)):
                state.ops += (Op("zero", node, place),)
            case ast.Assign(targets=targets) if any(map(_has_grad, targets)):
                state.ops += (Op("grads", node, place),)
            case ast.AugAssign(target=target) if _has_grad(target):
                state.ops += (Op("grads", node, place),)

    def _operations(self, call: ast.Call, state: State, place: Place) -> Iterator[Op]:
        """Yield what a call is."""
        script, called, name, owner = self.script, self.script.called(call), method(call), self.script.owner(call)
        key = self._versioned(owner, state)
        if CLIPPING.fullmatch(called):
            yield Op("clip", call, place, target=ast.unparse(call.args[0]) if call.args else "")
        elif called == "torch.autograd.backward":
            yield self._backward(call, call.args[0] if call.args else call, state, place)
        elif name and owner in script.scalers:
            kind = OF_SCALERS.get(name, name)
            if kind in ("scale", "unscale", "scaler_step", "update", "get_scale"):
                first = self._versioned(script.key(call.args[0]), state) if call.args else ""
                yield Op(kind, call, place, key, first)
        elif name == "backward" and (call.args or MANAGERS.search(owner)):
            yield Op("managed_backward", call, place)
        elif isinstance(call.func, ast.Attribute) and name == "backward":
            yield self._backward(call, call.func.value, state, place)
        elif name == "step" and owner in script.schedulers:
            yield Op("schedule", call, place, target=key)
        elif name in ("step", "first_step", "second_step") and owner in script.optimizers:
            yield Op("step", call, place, target=key)
        elif name == "zero_grad":
            yield Op("zero", call, place, target=key)
        elif name.endswith("_") and _has_grad(call.func):
            yield Op("grads", call, place)
        elif name in ("item", "tolist") and (scaler := state.scaled.get(owner)):
            yield Op("read", call, place, scaler, owner)
        else:
            yield from self._escapes(call, called, state, place)

    def _backward(self, call: ast.Call, loss: ast.expr, state: State, place: Place) -> Op:
        scaler = self._scaled_by(loss, state)
        return Op("scaled_backward" if scaler else "plain_backward", call, place, scaler, ast.unparse(loss))

    def _scaled_by(self, node: ast.expr, state: State) -> str:
        """Return the scaler by which a loss is scaled; "" if it is not."""
        for part in walked(node):
            if method(part) == "scale" and (owner := self.script.owner(part)) in self.script.scalers:
                return self._versioned(owner, state)
            if isinstance(part, (ast.Name, ast.Attribute)) and (found := state.scaled.get(self.script.name(part))):
                return found
        return ""

    def _escapes(self, call: ast.Call, name: str, state: State, place: Place) -> Iterator[Op]:
        """Yield what a function may change: what it is given, and what a function of the file uses."""
        if HARMLESS.fullmatch(name):
            return
        given = {self.script.key(n) for a in (*call.args, *(k.value for k in call.keywords)) for n in _parts(a)}
        local = self.script.mentions.get(name.rpartition(".")[2], set())
        root = name.partition(".")[0]
        for key in self.keys:
            inside = key.startswith(f"{root}.") and name.count(".") == 1 and not local
            if key in given or key in local or inside or (root == "super" and key.startswith("self.")):
                versioned = self._versioned(key, state)
                scaler = versioned if key in self.script.scalers else ""
                yield Op("escape", call, place, scaler, "" if scaler else versioned)

    # ------------------------------------------------------------------ names

    def _versioned(self, key: str, state: State) -> str:
        """Return a key with a mark of which assignment of its names it comes from."""
        versions = [str(state.versions[word]) for word in re.findall(r"\w+", key) if word in state.versions]
        return f"{key}#{'.'.join(versions)}" if versions and key else key

    def assign(self, node: ast.stmt, state: State) -> None:
        """Note what a statement assigns."""
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=name, value=ast.expr() as value):
                targets = [name]
            case ast.AugAssign(target=name):
                self.forget({self.script.key(name)}, state)
                return
            case _:
                return
        scaler = self._scaled_by(value, state) if _is_arithmetic(value) else ""
        new = isinstance(value, ast.Call) and SCALERS.fullmatch(self.script.called(value))
        for target in targets:
            self.rebind(target, state)
            if scaler:
                state.scaled[self.script.key(target)] = scaler
            if new:
                key = self._versioned(self.script.key(target), state)
                state.ops += (Op("new_scaler", value, Place(), key),)

    def rebind(self, target: ast.expr, state: State) -> None:
        """Note that names are assigned anew: they are other objects from here on."""
        keys = {self.script.key(n) for n in walked(target) if isinstance(n, (ast.Name, ast.Attribute))}
        for name in stored(target):
            state.versions[name] = state.versions.get(name, 0) + 1
        for key in keys:
            state.scaled.pop(key, None)
        self.forget(keys, state)

    @staticmethod
    def forget(keys: set[str], state: State) -> None:
        """Forget what was known of conditions with these names."""
        for text in [text for text in state.known if words(text) & {key.rpartition(".")[2] for key in keys}]:
            del state.known[text]


def _has_grad(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in walked(node))


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an argument, or the elements of one that is a list or a dict."""
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Dict(values=parts):
            yield from parts
        case ast.Starred(value=part):
            yield part
        case _:
            yield node


def _is_arithmetic(node: ast.expr) -> bool:
    """Return whether a value is a loss if its parts are: a sum, a quotient or a scaled loss."""
    if isinstance(node, ast.Call):
        return method(node) in ("scale", "mean", "sum")
    if isinstance(node, ast.BinOp):
        return _is_arithmetic(node.left) or _is_arithmetic(node.right)
    return isinstance(node, (ast.Name, ast.Attribute))
