"""Rules on a loss scaler's life: where it is made, when one is needed, what of it is saved, where its scale goes."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.ops import Op, plain
from halfstep.advise.lint.static.paths import Verdicts, on_paths
from halfstep.advise.lint.static.regions import argument, region_of, sites
from halfstep.advise.lint.static.script import SCALERS, Script, method, walked

OTHER_SCALING = re.compile(
    r"scaler|loss_?scal|grad_?scal|\.scale\(|accelerat|deepspeed|lightning|\bapex\b|fabric|TrainStep|hs\.prepare",
    re.IGNORECASE,
)
"""Words in a file that has another way to scale a loss than a GradScaler that is visible."""

FEW_STEPS = 20
"""With fewer steps between two growths of a scale more than a twentieth of all steps overflows."""


@check_of("HS011")
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


@check_of("HS012")
def _saved_without(script: Script) -> Iterator[Hit]:
    if not _lost(script, "state_dict", r"save|checkpoint|ckpt"):
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


@check_of("HS013")
def _loaded_without(script: Script) -> Iterator[Hit]:
    if not _lost(script, "load_state_dict", r"load|resume"):
        return
    for call in script.calls:
        own = any(_is_call(script, n, script.optimizers, "state_dict") for a in call.args for n in walked(a))
        if _is_call(script, call, script.optimizers, "load_state_dict") and not own:
            name = next(iter(script.scalers))
            yield Hit(call.lineno, f"the optimizer's state is loaded here, and that of `{name}` nowhere")


def _lost(script: Script, called: str, pattern: str) -> bool:
    """Return whether torch's scaler steps, nothing calls that method of it, and no function of such a name has it."""
    made = {method(call) for call in script.calls if script.owner(call) in script.scalers}
    handed_on = any(
        re.search(pattern, script.called(call), re.IGNORECASE)
        and any(script.name(a) in script.scalers for a in (*call.args, *(k.value for k in call.keywords)))
        for call in script.calls
    )
    return "torch" in script.scalers.values() and "step" in made and called not in made and not handed_on


def _is_call(script: Script, node: ast.AST, owners: Collection[str], name: str) -> bool:
    return method(node) == name and script.owner(node) in owners


@check_of("HS014")
def _fp16_without(script: Script) -> Iterator[Hit]:
    if OTHER_SCALING.search(script.text):
        return
    for function in script.functions:
        calls = sites(script, function)
        backward = any(method(s.call) == "backward" and not s.call.args for s in calls)
        if not backward or not any(_is_call(script, s.call, script.optimizers, "step") for s in calls):
            continue
        for region in dict.fromkeys(s.place.region for s in calls if not s.place.no_grad):
            if region is not None and region.library == "torch" and region.dtype == "fp16":
                if region.sure and region.enabled:
                    yield Hit(region.node.lineno, "the forward pass runs in fp16, and no loss is scaled in this file")


@check_of("HS015")
def _scaler_without(script: Script) -> Iterator[Hit]:
    if re.search(r"float16(?!\w)|\bhalf\b|fp16", script.text.replace("bfloat16", "")):
        return
    formats = {region.dtype for call in script.calls if (region := region_of(script, call)) is not None}
    for call in script.calls if formats == {"bf16"} else ():
        if SCALERS.fullmatch(script.called(call)) and "torch" in script.called(call):
            enabled = argument(call, None, "enabled")
            if not call.args[1:] and (enabled is None or (isinstance(enabled, ast.Constant) and enabled.value)):
                yield Hit(call.lineno, "every region of the file is bf16, and a loss is scaled")


@check_of("HS016")
def _penalty(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        calls = [site.call for site in sites(script, function)]
        if any(method(c) in ("get_scale", "unscale", "_scale_grads_") for c in calls) or "inv_scale" in script.text:
            continue
        for call in calls:
            if script.called(call) == "torch.autograd.grad":
                outputs = script.constant(argument(call, 0, "outputs"))
                for node in walked(outputs) if outputs is not None else ():
                    if _is_call(script, node, script.scalers, "scale"):
                        yield Hit(call.lineno, "gradients of a scaled loss are used as they are")


@check_of("HS049")
def _grows_often(script: Script) -> Iterator[Hit]:
    for call in script.calls:
        if SCALERS.fullmatch(name := script.called(call)) and name.startswith("torch."):
            match script.constant(argument(call, None, "growth_interval")):
                case ast.Constant(value=int(interval)) if interval < FEW_STEPS:
                    steps = f"{interval} good step{'s' * (interval != 1)}"
                    yield Hit(call.lineno, f"the scale doubles after {steps}")


@on_paths("HS017")
def _read(path: Sequence[Op]) -> Verdicts:
    divided = any(op.kind == "get_scale" for op in path)
    for op in path:
        if op.kind == "read":
            yield op, "" if divided else f"`{op.target}` is the loss times the scale of `{plain(op.scaler)}`"
