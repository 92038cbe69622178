"""Rules on the order of a loss scaler's calls: scale, backward, unscale_, clip, step, update."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import BACKWARD, CLIP, FORWARD, SCALED, STEP, UNSCALE, UPDATE, ZERO, loop
from halfstep.advise.lint.static.ops import BACKWARDS, Op, ends_window, in_each, plain
from halfstep.advise.lint.static.paths import judged
from halfstep.advise.lint.static.script import Script, walked

__all__ = ["SCALING_RULES"]

Verdict = Iterator[tuple[Op, str]]

UNKNOWN = frozenset({"escape", "grads", "get_scale", "managed_backward"})
"""Operations behind which the gradients' scale is not known."""


def _clip_scaled(path: Sequence[Op]) -> Verdict:
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


def _update_twice(path: Sequence[Op]) -> Verdict:
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


def _unscale_twice(path: Sequence[Op]) -> Verdict:
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


def _step_without_update(path: Sequence[Op]) -> Verdict:
    done: set[tuple[str, str]] = set()
    for op in path:
        if op.kind == "scaler_step":
            name, target = plain(op.scaler), plain(op.target)
            what = f"`{name}.step({target})` runs again with no `{name}.update()` since the last time"
            yield op, what if (op.scaler, op.target) in done else ""
            done.add((op.scaler, op.target))
        elif op.kind in ("update", "escape", "new_scaler"):
            done = {k for k in done if k[0] != op.scaler and op.target not in k[1:]}


def _unprotected_step(path: Sequence[Op]) -> Verdict:
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


def _second_step(path: Sequence[Op]) -> Verdict:
    stepped: set[str] = set()
    for op in path:
        if op.kind == "scaler_step":
            stepped.add(op.target)
        elif op.kind == "step":
            yield op, f"`{plain(op.target)}.step()` runs after the scaler's step of it" if op.target in stepped else ""
        elif op.kind in BACKWARDS or op.kind in ("zero", "iteration", "escape"):
            stepped = set()


def _forgotten_scale(script: Script) -> Iterator[Hit]:
    scales = [n for n in walked(script.tree) if isinstance(n, ast.Attribute) and n.attr in ("scale", "scale_loss")]
    dropped = [
        node.value
        for node in walked(script.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.func in scales
    ]
    for call in dropped:
        if (owner := script.called(call).rpartition(".")[0]) in script.scalers:
            yield Hit(call.lineno, f"the result of `{owner}.scale`, the scaled loss, is not used")
    if not scales:
        yield from judged(script, _never_scaled)


def _never_scaled(path: Sequence[Op]) -> Verdict:
    backward: Op | None = None
    for op in path:
        if op.kind == "plain_backward":
            backward = op
        elif op.kind in UNKNOWN:
            backward = None
        elif op.kind == "scaler_step" and backward:
            what = f"`{backward.target}.backward()` before `{plain(op.scaler)}.step`, and the file scales no loss"
            yield backward, what


def _update_between(path: Sequence[Op]) -> Verdict:
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


def _closure(script: Script) -> Iterator[Hit]:
    for node in walked(script.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            if script.scalers.get(owner := script.name(node.func.value)) == "torch":
                named = any(keyword.arg == "closure" for keyword in node.keywords)
                if named or (len(node.args) == 2 and not isinstance(node.args[1], ast.Starred)):
                    yield Hit(node.lineno, f"`{owner}.step` is given a closure")


def _scheduler(path: Sequence[Op]) -> Verdict:
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


ZEROS = "model.zero_grad()"

SCALING_RULES = (
    Rule.of(
        "HS001",
        bad=loop(FORWARD, SCALED, CLIP, STEP, UPDATE, ZERO),
        good=loop(FORWARD, SCALED, UNSCALE, CLIP, STEP, UPDATE, ZERO),
        check=lambda script: judged(script, _clip_scaled),
    ),
    Rule.of(
        "HS002",
        bad=loop(FORWARD, SCALED, STEP, UPDATE, UPDATE, ZERO),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=lambda script: judged(script, _update_twice, library="torch"),
    ),
    Rule.of(
        "HS003",
        bad=loop(FORWARD, SCALED, UNSCALE, CLIP, UNSCALE, STEP, UPDATE, ZERO),
        good=loop(FORWARD, SCALED, UNSCALE, CLIP, STEP, UPDATE, ZERO),
        check=lambda script: judged(script, _unscale_twice, library="torch"),
    ),
    Rule.of(
        "HS004",
        bad=loop(FORWARD, SCALED, STEP, ZERO),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=lambda script: judged(script, _step_without_update, library="torch"),
    ),
    Rule.of(
        "HS005",
        bad=loop(FORWARD, SCALED, "optimizer.step()", ZERO),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=lambda script: judged(script, _unprotected_step),
    ),
    Rule.of(
        "HS006",
        bad=loop(FORWARD, SCALED, STEP, "optimizer.step()", UPDATE, ZERO),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=lambda script: judged(script, _second_step),
    ),
    Rule.of(
        "HS007",
        bad=loop(FORWARD, "scaler.scale(loss)", BACKWARD, STEP, UPDATE, ZERO),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_forgotten_scale,
    ),
    Rule.of(
        "HS008",
        bad=loop(FORWARD, SCALED, "scaler.step(one)", UPDATE, "scaler.step(two)", UPDATE, ZEROS),
        good=loop(FORWARD, SCALED, "scaler.step(one)", "scaler.step(two)", UPDATE, ZEROS),
        check=lambda script: judged(script, _update_between),
    ),
    Rule.of(
        "HS009",
        bad=loop(FORWARD, SCALED, "scaler.step(optimizer, closure)", UPDATE),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_closure,
    ),
    Rule.of(
        "HS010",
        bad=loop(FORWARD, SCALED, STEP, UPDATE, "scheduler.step()", ZERO),
        good=loop(
            FORWARD, SCALED, STEP, "before = scaler.get_scale()", UPDATE,
            "if scaler.get_scale() >= before:\n        scheduler.step()", ZERO,
        ),
        check=lambda script: judged(script, _scheduler),
    ),
)  # fmt: skip
