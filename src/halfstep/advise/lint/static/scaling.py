"""Rules on the order of a loss scaler's calls: scale, backward, unscale_, clip, step, update."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.ops import BACKWARDS, Op, ends_window, in_each, plain
from halfstep.advise.lint.static.paths import Verdicts, judged, on_paths
from halfstep.advise.lint.static.script import Script, method, walked

UNKNOWN = frozenset({"escape", "grads", "get_scale", "managed_backward"})
"""Operations behind which the gradients' scale is not known."""


@on_paths("HS001")
def _clip_scaled(path: Sequence[Op]) -> Verdicts:
    scaler, known, waiting = "", False, []
    for op in path:
        if op.kind == "scaled_backward":
            scaler, known = op.scaler, True
        elif op.kind in UNKNOWN or op.kind in ("unscale", "plain_backward"):
            known = False
        elif op.kind == "clip" and scaler:
            waiting.append((op, known))
        elif op.kind == "scaler_step":
            for clip, bad in waiting:
                what = f"gradients are clipped while they are multiplied by the scale of `{plain(scaler)}`"
                yield clip, f"{what}: no `{plain(scaler)}.unscale_` since the backward pass" if bad else ""
            waiting = []
        elif op.kind in ("update", "zero"):
            scaler, known, waiting = "", False, []


@on_paths("HS002", library="torch")
def _update_twice(path: Sequence[Op]) -> Verdicts:
    state: dict[str, str] = {}
    for number, op in enumerate(path):
        if op.kind in ("scaler_step", "unscale"):
            state[op.scaler] = "stepped"
        elif op.kind == "escape" and op.scaler:
            state[op.scaler] = "unknown"
        elif op.kind == "new_scaler":
            state.pop(op.scaler, None)
        elif op.kind == "update" and isinstance(op.call, ast.Call) and not (op.call.args or op.call.keywords):
            name, before = plain(op.scaler), state.get(op.scaler, "")
            later = any(o.kind == "scaler_step" and o.scaler == op.scaler for o in path[number:])
            if before == "updated":
                yield op, f"`{name}.update()` runs twice with no `{name}.step` between"
            elif not before and later:
                yield op, f"`{name}.update()` runs before the first `{name}.step`"
            else:
                yield op, ""
            state[op.scaler] = "updated"


@on_paths("HS003", library="torch")
def _unscale_twice(path: Sequence[Op]) -> Verdicts:
    done: dict[tuple[str, str], str] = {}
    backward: Op | None = None
    for op in path:
        key = (op.scaler, op.target)
        if op.kind == "scaled_backward":
            backward = op
        elif op.kind == "unscale":
            name, target = plain(op.scaler), plain(op.target)
            before = done.get(key)
            what = f"`{name}.unscale_({target})` runs a second time before `{name}.update()`"
            if before == "step":
                what = f"`{name}.unscale_({target})` runs after `{name}.step({target})`, before `{name}.update()`"
            steps_in_some = any(o.kind == "scaler_step" and ends_window(o) for o in path)
            always = backward is not None and in_each(op, backward)
            if before and (always or not steps_in_some):
                yield op, what
            elif not always or not steps_in_some:  # else a step comes between in some iterations, and not in others
                yield op, ""
            done[key] = "unscale"
        elif op.kind == "scaler_step":
            done[key] = "step"
        elif op.kind in ("update", "escape", "new_scaler"):
            done = {k: v for k, v in done.items() if k[0] != op.scaler and op.target not in k[1:]}


@on_paths("HS004", library="torch")
def _step_without_update(path: Sequence[Op]) -> Verdicts:
    done: set[tuple[str, str]] = set()
    for op in path:
        if op.kind == "scaler_step":
            name, target = plain(op.scaler), plain(op.target)
            what = f"`{name}.step({target})` runs again with no `{name}.update()` since the last time"
            yield op, what if (op.scaler, op.target) in done else ""
            done.add((op.scaler, op.target))
        elif op.kind in ("update", "escape", "new_scaler"):
            done = {k for k in done if k[0] != op.scaler and op.target not in k[1:]}


@on_paths("HS005")
def _unprotected_step(path: Sequence[Op]) -> Verdicts:
    scaler, sure, stepped = "", False, set[str]()
    for op in path:
        if op.kind == "scaled_backward":
            sure = sure if scaler else True
            scaler, stepped = op.scaler, set()
        elif op.kind in UNKNOWN or op.kind in ("unscale", "plain_backward"):
            scaler, sure = scaler or op.scaler or "?", False
        elif op.kind == "scaler_step":
            stepped.add(op.target)
            sure = False  # the scaled gradients may be those of this optimizer alone
        elif op.kind == "step" and op.target not in stepped:
            what = f"`{plain(op.target)}.step()` is given gradients of a loss scaled by `{plain(scaler)}`"
            yield op, what if sure else ""
        elif op.kind in ("iteration", "zero"):
            scaler, sure = "", False


@on_paths("HS006")
def _second_step(path: Sequence[Op]) -> Verdicts:
    stepped: set[str] = set()
    for op in path:
        if op.kind == "scaler_step":
            stepped.add(op.target)
        elif op.kind == "step":
            yield op, f"`{plain(op.target)}.step()` runs after the scaler's step of it" if op.target in stepped else ""
        elif op.kind in BACKWARDS or op.kind in ("zero", "iteration", "escape"):
            stepped = set()


@check_of("HS007")
def _forgotten_scale(script: Script) -> Iterator[Hit]:
    for node in walked(script.tree):
        if isinstance(node, ast.Expr) and method(node.value) in ("scale", "scale_loss"):
            if (owner := script.owner(node.value)) in script.scalers:
                yield Hit(node.value.lineno, f"the result of `{owner}.scale`, the scaled loss, is not used")
    if not any(isinstance(n, ast.Attribute) and n.attr in ("scale", "scale_loss") for n in walked(script.tree)):
        yield from judged(script, _never_scaled)


def _never_scaled(path: Sequence[Op]) -> Verdicts:
    backward: Op | None = None
    for op in path:
        if op.kind == "plain_backward":
            backward = op
        elif op.kind in UNKNOWN:
            backward = None
        elif op.kind == "scaler_step" and backward:
            what = f"`{backward.target}.backward()` before `{plain(op.scaler)}.step`, and the file scales no loss"
            yield backward, what


@on_paths("HS008")
def _update_between(path: Sequence[Op]) -> Verdicts:
    scaled, updated = set[str](), set[str]()  # scalers by which a loss was scaled; those updated since
    stepped: set[str] = set()
    for op in path:
        if op.kind in ("scale", "scaled_backward"):
            scaled, updated, stepped = scaled | {op.scaler}, updated - {op.scaler}, set()
        elif op.kind == "update":
            updated.add(op.scaler)
        elif op.kind in UNKNOWN or op.kind == "new_scaler":
            scaled, updated = set(), set()
        elif op.kind == "scaler_step":
            bad = op.scaler in scaled & updated and bool(stepped) and op.target not in stepped
            name, target = plain(op.scaler), plain(op.target)
            what = f"`{name}.step({target})` follows `{name}.update()`, and its loss was scaled before it"
            yield op, what if bad else ""
            stepped.add(op.target)


@check_of("HS009")
def _closure(script: Script) -> Iterator[Hit]:
    for call in script.calls:
        if method(call) == "step" and script.scalers.get(owner := script.owner(call)) == "torch":
            named = any(keyword.arg == "closure" for keyword in call.keywords)
            if named or (len(call.args) == 2 and not isinstance(call.args[1], ast.Starred)):
                yield Hit(call.lineno, f"`{owner}.step` is given a closure")


@on_paths("HS010")
def _scheduler(path: Sequence[Op]) -> Verdicts:
    step: Op | None = None
    for op in path:
        if op.kind == "scaler_step":
            step = op
        elif op.kind in ("iteration", "scaled_backward"):
            step = None
        elif op.kind == "schedule" and step is not None:
            name = plain(op.target)
            same = op.place.loops == step.place.loops and set(op.place.branches) <= set(step.place.branches)
            what = f"`{name}.step()` also runs after a step that `{plain(step.scaler)}` skipped"
            yield op, what if same and op.place.loops else ""
