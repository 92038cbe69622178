"""Rules on scripts of NVIDIA Apex: what amp.initialize takes, where a loss is scaled, what a checkpoint needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.paths import CLIPPING
from halfstep.advise.lint.static.regions import Site, all_sites, argument
from halfstep.advise.lint.static.scaling import holds_optimizer
from halfstep.advise.lint.static.script import OPTIMIZERS, Script, method, walked
from halfstep.advise.lint.static.weights import made_low


def _amp(script: Script, node: ast.AST) -> str:
    """Return the function of apex.amp that a call names; "" for other calls."""
    found = re.fullmatch(r"(.*\.)?apex\.amp\.(\w+)", script.called(node))
    return found[2] if found else ""


def _initialized(script: Script) -> Iterator[Site]:
    """Yield the calls of amp.initialize that are not under a condition, and not told to do nothing."""
    for site in all_sites(script):
        if _amp(script, site.call) == "initialize" and not site.place.branches:
            level, enabled = _level(script, site), argument(site.call, 2, "enabled")
            if level != "O0" and (enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True)):
                yield site


def _level(script: Script, site: Site) -> str:
    """Return the opt_level of amp.initialize, "O1" if it is not given; "" if it is not known."""
    given = script.constant(argument(site.call, 3, "opt_level"))
    return "O1" if given is None else str(given.value) if isinstance(given, ast.Constant) else ""


def _names(script: Script, node: ast.expr | None) -> set[str]:
    """Return the objects that an argument of amp.initialize is or lists."""
    parts = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node] if node is not None else []
    return {script.key(part) for part in parts}


@check_of("HS056")
def _never_scaled(script: Script) -> Iterator[Hit]:
    if not list(_initialized(script)) or "scale_loss" in script.text:
        return
    for site in all_sites(script):
        if method(site.call) == "backward" and script.owner(site.call) not in script.optimizers:
            yield Hit(site.call.lineno, f"`{ast.unparse(site.call)}` under amp.initialize, and the file scales no loss")


@check_of("HS057")
def _clips_copies(script: Script) -> Iterator[Hit]:
    for made in _initialized(script):
        masters = argument(made.call, None, "master_weights")
        models = _names(script, argument(made.call, 0, "models")) if _level(script, made) == "O2" else set()
        for call in script.calls if masters is None else ():
            first = call.args[0] if CLIPPING.fullmatch(script.called(call)) and call.args else None
            if method(first) == "parameters" and first is not None and script.owner(first) in models:
                yield Hit(call.lineno, f"under O2 the optimizer steps fp32 copies, not `{ast.unparse(first)}`")


@check_of("HS058")
def _state(script: Script) -> Iterator[Hit]:
    used = {_amp(script, call) for call in script.calls}
    if not list(_initialized(script)):
        return
    for call in script.calls:
        own = script.owner(call) in script.optimizers
        saves = script.called(call) == "torch.save" and call.args and holds_optimizer(script, call.args[0])
        if saves and "state_dict" not in used:
            yield Hit(call.lineno, "the optimizer's state is saved here, and `amp.state_dict()` nowhere")
        elif own and method(call) == "load_state_dict" and "load_state_dict" not in used:
            yield Hit(call.lineno, "the optimizer's state is loaded here, and that of amp nowhere")


@check_of("HS059")
def _half_before(script: Script) -> Iterator[Hit]:
    for made in _initialized(script):
        models = _names(script, argument(made.call, 0, "models"))
        for site in all_sites(script):
            before = site.call.lineno < made.call.lineno and not site.place.branches
            if before and script.low_format(site.call) and (model := made_low(script, site)) in models:
                yield Hit(site.call.lineno, f"`{model}` is made low before amp.initialize, which refuses it")


@check_of("HS060")
def _inside_scaling(script: Script) -> Iterator[Hit]:
    for node in walked(script.tree):
        if isinstance(node, ast.With) and any(_amp(script, item.context_expr) == "scale_loss" for item in node.items):
            for call in [n for statement in node.body for n in walked(statement) if isinstance(n, ast.Call)]:
                steps = method(call) == "step" and script.owner(call) in script.optimizers
                if steps or CLIPPING.fullmatch(script.called(call)):
                    yield Hit(call.lineno, f"`{script.called(call)}` inside of amp.scale_loss, before it unscales")


@check_of("HS061")
def _unknown_optimizer(script: Script) -> Iterator[Hit]:
    scaled = {script.key(c.args[1]) for c in script.calls if _amp(script, c) == "scale_loss" and len(c.args) > 1}
    lines = [made.call.lineno for made in _initialized(script)]
    for site in all_sites(script) if lines else ():
        if OPTIMIZERS.fullmatch(script.called(site.call)) and isinstance(site.statement, ast.Assign):
            name = script.key(site.statement.targets[0])
            if name in scaled and site.call.lineno > max(lines):
                yield Hit(site.call.lineno, f"`{name}` is made behind amp.initialize, which does not know it")
