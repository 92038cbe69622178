"""Rules on training loops: gradients that stay, micro-batches, waits for the device, a step that is made twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.paths import BACKWARDS, Op, Verdicts, ends_window, in_each, judged, on_paths, plain
from halfstep.advise.lint.static.regions import sites
from halfstep.advise.lint.static.script import Script, method, walked

CLEARS = re.compile(r"zero_grad|\.grad\s*=|set_to_none|\.grad\.(zero_|detach_|fill_)|optimizer_zero|clear_grad")
TRAIN_STEPS = ("halfstep.TrainStep", "halfstep.step.TrainStep")
OWN_LOOPS = re.compile(r"accelerat|deepspeed|lightning|fabric|colossal", re.IGNORECASE)
"""Words in a file whose loop another library runs: what it clears and when it steps is not in the file."""


@check_of("HS034")
def _never_cleared(script: Script) -> Iterable[Hit]:
    found = CLEARS.search(script.text) or OWN_LOOPS.search(script.text)
    return () if found else judged(script, _accumulates)


def _accumulates(path: Sequence[Op]) -> Verdicts:
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


@check_of("HS035")
def _cleared_if_finite(script: Script) -> Iterator[Hit]:
    for node in walked(script.tree) if script.uses_torch else ():
        if not isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            continue
        clears = {n for n in walked(node) if method(n) == "zero_grad"}
        for choice in [n for n in walked(node) if isinstance(n, ast.If) and not n.orelse and clears]:
            test = script.constant(choice.test)
            inside = {n for statement in choice.body for n in walked(statement)}
            called = set(map(method, inside))
            if "step" in called and "backward" not in called and clears <= inside and test and _finite(test):
                yield Hit(choice.lineno, f"gradients are cleared only under `{ast.unparse(choice.test)}`")


def _finite(test: ast.expr) -> bool:
    """Return whether a condition is true where values are finite."""
    text = ast.unparse(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return "isfinite" not in text and bool(re.search("isnan|isinf", text))
    return "isfinite" in text and not any(isinstance(n, ast.Not) for n in walked(test))


@on_paths("HS036")
def _clip_in_micro_batch(path: Sequence[Op]) -> Verdicts:
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


@check_of("HS037")
def _waits(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        looped = [site for site in sites(script, function) if site.place.loops]
        training = {s.place.loops[-1] for s in looped if method(s.call) == "backward"}
        losses, seen, waited = _losses(script, function.node), set(), set()
        for site in looped:
            loop, call = site.place.loops[-1], site.call
            if loop not in training or site.place.branches or site.place.no_grad:
                continue
            if script.called(call).endswith("synchronize"):
                waited.add(loop)
            name = script.owner(call) if method(call) == "item" else ""
            if script.called(call) == "float" and call.args:
                name = script.name(call.args[0])
            if name in losses and (name, loop) not in seen and loop not in waited:
                seen.add((name, loop))
                yield Hit(call.lineno, f"`{ast.unparse(call)}` waits for the device in every step")


def _losses(script: Script, function: ast.AST) -> set[str]:
    found = set()
    for node in walked(function):
        match node:
            case ast.Call(func=ast.Attribute(attr="backward", value=loss)):
                scaled = loss.args if isinstance(loss, ast.Call) and method(loss) == "scale" else []
                found.add(script.name(scaled[0] if scaled else loss))
    return found - {""}


@check_of("HS038")
def _own_step(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        calls = sites(script, function)
        made = [s for s in calls if script.called(s.call) in TRAIN_STEPS and len(s.call.args) > 1]
        for step, optimizer in {script.target(s.statement): script.name(s.call.args[1]) for s in made}.items():
            steps = [s.place for s in calls if s.place.loops and script.called(s.call) == step]
            for site in calls:
                beside = any(p.loops == site.place.loops and p.branches == site.place.branches for p in steps)
                if step and beside and optimizer and script.called(site.call) == f"{optimizer}.step":
                    yield Hit(site.call.lineno, f"`{step}(...)` has stepped `{optimizer}` already")
