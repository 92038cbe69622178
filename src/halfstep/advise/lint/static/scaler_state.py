"""Rules on a loss scaler's life: where it is made, when one is needed, what of it is saved, where its scale goes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import BACKWARD, FORWARD, FORWARD_BF16, SCALED, STEP, UPDATE, ZERO, loop
from halfstep.advise.lint.static.ops import Op, plain
from halfstep.advise.lint.static.paths import judged
from halfstep.advise.lint.static.regions import argument, region_of, sites
from halfstep.advise.lint.static.script import SCALERS, Script, walked

__all__ = ["SCALER_STATE_RULES"]

OTHER_SCALING = re.compile(
    r"scaler|loss_?scal|grad_?scal|\.scale\(|accelerat|deepspeed|lightning|\bapex\b|fabric|TrainStep|hs\.prepare",
    re.IGNORECASE,
)
"""Words in a file that has another way to scale a loss than a GradScaler that is visible."""

FEW_STEPS = 20
"""With fewer steps between two growths of a scale more than a twentieth of all steps overflows."""


def _made_in_loop(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        steps = [s for s in sites(script, function) if _is_call(script, s.call, script.scalers, "step") and s.call.args]
        for site in sites(script, function):
            if not SCALERS.fullmatch(script.called(site.call)) or not isinstance(site.statement, ast.Assign):
                continue
            key = script.key(site.statement.targets[0])
            for step in steps:
                shared = [loop for loop in site.place.loops if loop in step.place.loops]
                same = script.called(step.call) == f"{key}.step" and not site.place.branches
                if shared and same and not _assigned_in(script, shared[-1], script.key(step.call.args[0])):
                    yield Hit(site.call.lineno, f"`{key}` is made anew in each iteration of the loop in which it steps")
                    break


def _assigned_in(script: Script, loop: ast.stmt, key: str) -> bool:
    """Return whether a loop assigns an object: another training begins in each iteration."""
    return any(
        isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Store) and script.key(n) == key
        for n in walked(loop)
    )


def _saved_without(script: Script) -> Iterator[Hit]:
    handed_on = _handed_on(script, r"save|checkpoint|ckpt")
    if not _steps(script) or handed_on or _calls(script, script.scalers, "state_dict"):
        return
    seen = set()
    for node in script.calls:
        if script.called(node) == "torch.save" and node.args:
            if (text := ast.unparse(node.args[0])) in seen:
                continue
            seen.add(text)
            saved = [node.args[0], *(value.node for value in script.assigned.get(script.key(node.args[0]), []))]
            if any(_is_call(script, n, script.optimizers, "state_dict") for part in saved for n in walked(part)):
                name = next(iter(script.scalers))
                yield Hit(node.lineno, f"the optimizer's state is saved here, and `{name}.state_dict()` nowhere")


def _loaded_without(script: Script) -> Iterator[Hit]:
    if not _steps(script) or _calls(script, script.scalers, "load_state_dict") or _handed_on(script, r"load|resume"):
        return
    for call in _calls(script, script.optimizers, "load_state_dict"):
        if any(_is_call(script, n, script.optimizers, "state_dict") for a in call.args for n in walked(a)):
            continue  # its own state, not one from a checkpoint
        name = next(iter(script.scalers))
        yield Hit(call.lineno, f"the optimizer's state is loaded here, and that of `{name}` nowhere")


def _steps(script: Script) -> bool:
    """Return whether the file steps optimizers by torch's scaler."""
    return any(library == "torch" for library in script.scalers.values()) and bool(
        _calls(script, script.scalers, "step")
    )


def _calls(script: Script, owners: object, method: str) -> list[ast.Call]:
    return [n for n in walked(script.tree) if isinstance(n, ast.Call) and _is_call(script, n, owners, method)]


def _is_call(script: Script, node: ast.AST, owners: object, method: str) -> bool:
    owner, _, called = script.called(node).rpartition(".")
    return called == method and owner in owners  # type: ignore[operator]  # a set or a dict of names


def _handed_on(script: Script, pattern: str) -> bool:
    """Return whether a scaler is given to a function of such a name."""
    return any(
        re.search(pattern, script.called(node), re.IGNORECASE)
        and any(script.name(a) in script.scalers for a in (*node.args, *(k.value for k in node.keywords)))
        for node in walked(script.tree)
        if isinstance(node, ast.Call)
    )


def _fp16_without(script: Script) -> Iterator[Hit]:
    if OTHER_SCALING.search(script.text):
        return
    for function in script.functions:
        calls = sites(script, function)
        trained = any(_method(s.call) == "backward" and not s.call.args for s in calls) and any(
            script.called(s.call).rpartition(".")[0] in script.optimizers and _method(s.call) == "step" for s in calls
        )
        regions = {s.place.region: None for s in calls if s.place.region is not None and not s.place.no_grad}
        for region in regions if trained else ():
            if region.library == "torch" and region.dtype == "fp16" and region.sure and region.enabled:
                yield Hit(region.node.lineno, "the forward pass runs in fp16, and no loss is scaled in this file")


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _scaler_without(script: Script) -> Iterator[Hit]:
    if re.search(r"float16(?!\w)|\bhalf\b|fp16", script.text.replace("bfloat16", "")):
        return
    regions = [r for n in walked(script.tree) if isinstance(n, ast.Call) and (r := region_of(script, n)) is not None]
    if not regions or any(region.dtype != "bf16" for region in regions):
        return
    for node in walked(script.tree):
        if isinstance(node, ast.Call) and SCALERS.fullmatch(script.called(node)) and "torch" in script.called(node):
            enabled = argument(node, None, "enabled")
            if not node.args[1:] and (enabled is None or (isinstance(enabled, ast.Constant) and enabled.value)):
                yield Hit(node.lineno, "every region of the file is bf16, and a loss is scaled")


def _penalty(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        calls = [site.call for site in sites(script, function)]
        if any(_method(c) in ("get_scale", "unscale", "_scale_grads_") for c in calls) or "inv_scale" in script.text:
            continue
        for call in calls:
            if script.called(call) == "torch.autograd.grad":
                outputs = script.constant(argument(call, 0, "outputs"))
                for node in walked(outputs) if outputs is not None else ():
                    if isinstance(node, ast.Call) and _is_call(script, node, script.scalers, "scale"):
                        yield Hit(call.lineno, "gradients of a scaled loss are used as they are")


def _grows_often(script: Script) -> Iterator[Hit]:
    for call in script.calls:
        if SCALERS.fullmatch(name := script.called(call)) and name.startswith("torch."):
            interval = script.constant(argument(call, None, "growth_interval"))
            if isinstance(interval, ast.Constant) and isinstance(interval.value, int) and interval.value < FEW_STEPS:
                yield Hit(
                    call.lineno, f"the scale doubles after {interval.value} good step{'s' * (interval.value != 1)}"
                )


def _read(path: Sequence[Op]) -> Iterator[tuple[Op, str]]:
    divided = any(op.kind == "get_scale" for op in path)
    for op in path:
        if op.kind == "read":
            yield op, "" if divided else f"`{op.target}` is the loss times the scale of `{plain(op.scaler)}`"


SCALER_STATE_RULES = (
    Rule(
        code="HS011",
        severity="error",
        title="a loss scaler made inside of the loop",
        why="Each one starts at the first scale (65536) again: steps are skipped until the scale has come down, "
        "and what was found out is thrown away.",
        fix="Make one scaler before all loops.",
        bad=loop("scaler = torch.amp.GradScaler()", FORWARD, SCALED, STEP, UPDATE, ZERO, before=""),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_made_in_loop,
    ),
    Rule(
        code="HS012",
        severity="warning",
        title="a checkpoint without the scaler's state",
        why="A resumed run starts at the first scale again: steps are skipped until it has come down, and the run "
        "is not the one that was interrupted.",
        fix="Save `\"scaler\": scaler.state_dict()` beside the optimizer's state; `hs.save` saves all.",
        bad=loop(FORWARD, SCALED, STEP, UPDATE, ZERO)
        + '\ntorch.save({"optimizer": optimizer.state_dict()}, "last.pt")',
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO)
        + '\ntorch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")',
        check=_saved_without,
    ),
    Rule(
        code="HS013",
        severity="warning",
        title="a run goes on without the scaler's state",
        why="The scale is 65536 again, or what the constructor has: steps are skipped until it has come down.",
        fix="Call `scaler.load_state_dict(...)` where the optimizer's state is loaded; `hs.load` loads all.",
        bad=loop(
            FORWARD, SCALED, STEP, UPDATE, ZERO,
            before='scaler = torch.amp.GradScaler()\noptimizer.load_state_dict(torch.load("last.pt")["optimizer"])',
        ),
        good=loop(
            FORWARD, SCALED, STEP, UPDATE, ZERO,
            before='scaler = torch.amp.GradScaler()\nsaved = torch.load("last.pt")\n'
            'optimizer.load_state_dict(saved["optimizer"])\nscaler.load_state_dict(saved["scaler"])',
        ),
        check=_loaded_without,
    ),
    Rule(
        code="HS014",
        severity="error",
        title="fp16 without a loss scaler",
        why="Gradients below 3e-8 become zero in fp16: small layers stop learning without an error.",
        fix="Scale the loss with torch.amp.GradScaler, or use bf16, which has fp32's range.",
        bad=loop(FORWARD, BACKWARD, "optimizer.step()", ZERO, before=""),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_fp16_without,
    ),
    Rule(
        code="HS015",
        severity="warning",
        title="a loss scaler with bf16",
        why="bf16 has fp32's range, so nothing needs a scale: it costs a pass over all gradients and, with most "
        "optimizers on CUDA, a wait of the host in each step.",
        fix="Delete the scaler, or write GradScaler(enabled=dtype == torch.float16).",
        bad=loop(FORWARD_BF16, SCALED, STEP, UPDATE, ZERO),
        good=loop(FORWARD_BF16, BACKWARD, "optimizer.step()", ZERO, before=""),
        check=_scaler_without,
    ),
    Rule(
        code="HS016",
        severity="error",
        title="a gradient penalty of scaled gradients",
        why="torch.autograd.grad of a scaled loss returns gradients times the scale, so the penalty's norm is "
        "thousands of times too large.",
        fix="Divide them by `scaler.get_scale()` before the penalty is computed, and skip it where they are not "
        "finite.",
        bad=loop(
            FORWARD,
            "grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)",
            "loss = loss + sum(g.square().sum() for g in grads)", SCALED, STEP, UPDATE, ZERO,
        ),
        good=loop(
            FORWARD,
            "grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)",
            "loss = loss + sum((g / scaler.get_scale()).square().sum() for g in grads)", SCALED, STEP, UPDATE, ZERO,
        ),
        check=_penalty,
    ),
    Rule(
        code="HS017",
        severity="warning",
        title="a scaled loss is read as the loss",
        why="The number is as many times too large as the scale, and jumps when the scale changes.",
        fix="Give the scaled loss a name of its own, or none: `scaler.scale(loss).backward()`.",
        bad=loop(FORWARD, "loss = scaler.scale(loss)", BACKWARD, STEP, UPDATE, ZERO)
        + "\n    if y[0] == 0:\n        print(loss.item())",
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO) + "\n    if y[0] == 0:\n        print(loss.item())",
        check=lambda script: judged(script, _read),
    ),
    Rule(
        code="HS049",
        severity="warning",
        title="a loss scale that grows too often",
        why="Once the scale has reached the largest one that works, every growth overflows and costs a skipped "
        "step: with growth_interval=1 every second step.",
        fix="Leave growth_interval at 2000, or at some hundreds in short runs.",
        bad=loop(FORWARD, SCALED, STEP, UPDATE, ZERO, before="scaler = torch.amp.GradScaler(growth_interval=1)"),
        good=loop(FORWARD, SCALED, STEP, UPDATE, ZERO),
        check=_grows_often,
    ),
)  # fmt: skip
