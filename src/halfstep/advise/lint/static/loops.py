"""Rules on training loops: gradients that stay, micro-batches, waits for the device, a step that is made twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import (
    BACKWARD,
    CLIP,
    FORWARD,
    FORWARD_BF16,
    SCALED,
    STEP,
    UNSCALE,
    UPDATE,
    ZERO,
    loop,
)
from halfstep.advise.lint.static.ops import BACKWARDS, Op, ends_window, in_each, plain
from halfstep.advise.lint.static.paths import judged
from halfstep.advise.lint.static.regions import Site, sites
from halfstep.advise.lint.static.script import Script, walked

__all__ = ["LOOP_RULES"]

CLEARS = re.compile(r"zero_grad|\.grad\s*=|set_to_none|\.grad\.(zero_|detach_|fill_)|optimizer_zero|clear_grad")
FINITE = re.compile(r"isfinite|isnan|isinf")
TRAIN_STEPS = ("halfstep.TrainStep", "halfstep.step.TrainStep")
OWN_LOOPS = re.compile(r"accelerat|deepspeed|lightning|fabric|colossal", re.IGNORECASE)
"""Words in a file whose loop another library runs: what it clears and when it steps is not in the file."""


def _never_cleared(script: Script) -> Iterator[Hit]:
    if CLEARS.search(script.text) or OWN_LOOPS.search(script.text):
        return
    yield from judged(script, _accumulates)


def _accumulates(path: Sequence[Op]) -> Iterator[tuple[Op, str]]:
    stepped: set[str] = set()
    backward = False
    for op in path:
        if op.kind in ("scaled_backward", "plain_backward"):
            backward = True
        elif op.kind in ("step", "scaler_step"):
            what = f"`{plain(op.target)}` steps in every iteration, and the file never sets gradients to zero"
            yield op, what if op.target in stepped and backward else ""
            stepped.add(op.target)
            backward = False
        elif op.kind in ("escape", "managed_backward") and op.target:
            yield from ((each, "") for each in path if each.kind in ("step", "scaler_step"))
            return


def _cleared_if_finite(script: Script) -> Iterator[Hit]:
    for node in walked(script.tree) if script.uses_torch else ():
        if not isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            continue
        clears = {n for n in walked(node) if _calls(n, "zero_grad")}
        for choice in [n for n in walked(node) if isinstance(n, ast.If) and not n.orelse]:
            test = script.constant(choice.test)
            if test is None or not FINITE.search(ast.unparse(test)) or not _finite(test):
                continue
            inside = {n for statement in choice.body for n in walked(statement)}
            stepped = any(_calls(n, "step") for n in inside) and not any(_calls(n, "backward") for n in inside)
            if stepped and clears and clears <= inside:
                yield Hit(choice.lineno, f"gradients are cleared only under `{ast.unparse(choice.test)}`")


def _finite(test: ast.expr) -> bool:
    """Return whether a condition is true where values are finite."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return "isfinite" not in ast.unparse(test)
    return "isfinite" in ast.unparse(test) and not any(isinstance(n, ast.Not) for n in walked(test))


def _calls(node: ast.AST, method: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method


def _clip_in_micro_batch(path: Sequence[Op]) -> Iterator[tuple[Op, str]]:
    clipped: dict[ast.AST, bool] = {}  # a clip since the last step -> whether a backward pass followed it
    backward: Op | None = None
    stepping = any(op.kind in ("step", "scaler_step") and ends_window(op) for op in path)
    for op in path:
        if op.kind == "clip" and stepping and backward is not None and in_each(op, backward):
            if clipped.get(op.call, False):
                yield op, "gradients are clipped in every micro-batch, and the optimizer steps in some"
            clipped[op.call] = False
        elif op.kind in BACKWARDS:
            backward = op
            clipped = dict.fromkeys(clipped, True)
        elif op.kind in ("step", "scaler_step", "zero", "escape"):
            clipped = {}


def _waits(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        inner = {s.place.loops[-1] for s in sites(script, function) if s.place.loops and _is_training(s)}
        losses, seen, waited = _losses(script, function.node), set(), set()
        for site in sites(script, function):
            if not site.place.loops or site.place.loops[-1] not in inner or site.place.branches or site.place.no_grad:
                continue
            call = site.call
            if script.called(call).endswith("synchronize"):
                waited.add(site.place.loops[-1])
            value = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "item" else None
            if script.called(call) == "float" and call.args:
                value = call.args[0]
            name = script.name(value) if value is not None else ""
            if name in losses and (name, site.place.loops[-1]) not in seen and site.place.loops[-1] not in waited:
                seen.add((name, site.place.loops[-1]))
                yield Hit(call.lineno, f"`{ast.unparse(call)}` waits for the device in every step")


def _is_training(site: Site) -> bool:
    return isinstance(site.call.func, ast.Attribute) and site.call.func.attr == "backward"


def _losses(script: Script, function: ast.AST) -> set[str]:
    """Return the names whose backward pass a function runs."""
    found = set()
    for node in walked(function):
        if _calls(node, "backward") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            loss = node.func.value
            if _calls(loss, "scale") and isinstance(loss, ast.Call) and loss.args:
                loss = loss.args[0]
            found.add(script.name(loss))
    return found - {""}


def _own_step(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        calls = sites(script, function)
        made = {  # step -> its optimizer
            script.key(s.statement.targets[0]): script.name(s.call.args[1])
            for s in calls
            if isinstance(s.statement, ast.Assign) and script.called(s.call) in TRAIN_STEPS and len(s.call.args) > 1
        }
        for step, optimizer in made.items():
            steps = [s.place for s in calls if s.place.loops and script.called(s.call) == step]
            for site in calls:
                beside = any(p.loops == site.place.loops and p.branches == site.place.branches for p in steps)
                if beside and optimizer and script.called(site.call) == f"{optimizer}.step":
                    yield Hit(site.call.lineno, f"`{step}(...)` has stepped `{optimizer}` already")


LAST = "if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()"

LOOP_RULES = (
    Rule.of(
        "HS034",
        bad=loop(FORWARD, SCALED, STEP, UPDATE),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_never_cleared,
    ),
    Rule.of(
        "HS035",
        bad=loop(
            FORWARD_BF16, BACKWARD, "norm = " + CLIP,
            "if torch.isfinite(norm):\n        optimizer.step()\n        optimizer.zero_grad()", before="",
        ),
        good=loop(
            FORWARD_BF16, BACKWARD, "norm = " + CLIP,
            "if torch.isfinite(norm):\n        optimizer.step()", ZERO, before="",
        ),
        check=_cleared_if_finite,
    ),
    Rule.of(
        "HS036",
        bad=loop(FORWARD_BF16, BACKWARD, CLIP, LAST, before=""),
        good=loop(FORWARD_BF16, BACKWARD, LAST.replace("optimizer.step", f"{CLIP}\n        optimizer.step"), before=""),
        check=lambda script: judged(script, _clip_in_micro_batch),
    ),
    Rule(
        code="HS037",
        severity="note",
        title="the loss is copied to the host in every step",
        why="The host waits until the device has done all its work, and the device then waits for the next "
        "kernels.",
        fix="Add up `loss.detach()` on the device, and call .item() where the number is printed.",
        bad=loop(FORWARD, SCALED, UNSCALE, STEP, UPDATE, ZERO, "total += loss.item()"),
        good=loop(FORWARD, SCALED, UNSCALE, STEP, UPDATE, ZERO, "total += loss.detach()"),
        check=_waits,
    ),
    Rule.of(
        "HS038",
        bad="""
import halfstep as hs

step = hs.TrainStep(model, optimizer, loss_fn, policy="mixed")
for x, y in loader:
    step(x, y)
    optimizer.step()
""",
        good="""
import halfstep as hs

step = hs.TrainStep(model, optimizer, loss_fn, policy="mixed")
for x, y in loader:
    step(x, y)
""",
        check=_own_step,
    ),
)  # fmt: skip
