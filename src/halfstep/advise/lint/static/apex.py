"""Rules on scripts of NVIDIA Apex: what amp.initialize takes, where a loss is scaled, what a checkpoint needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.paths import CLIPPING, WINDOW, words
from halfstep.advise.lint.static.regions import Site, all_sites, sites
from halfstep.advise.lint.static.scaling import holds_optimizer
from halfstep.advise.lint.static.script import OPTIMIZERS, Script, argument, method, walked
from halfstep.advise.lint.static.weights import made_low


def _amp(script: Script, node: ast.AST) -> str:
    """Return the function of apex.amp that a call names; "" for other calls."""
    found = re.fullmatch(r"(.*\.)?apex\.amp\.(\w+)", script.called(node))
    return found[2] if found else ""


def _initialized(script: Script) -> Iterator[Site]:
    """Yield the calls of amp.initialize that are not told to do nothing; under a condition, that may be a flag."""
    for site in all_sites(script):
        if _amp(script, site.call) == "initialize":
            level, enabled = _level(script, site), argument(site.call, 2, "enabled")
            if level != "O0" and (enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True)):
                yield site


def _level(script: Script, site: Site) -> str:
    given = script.constant(argument(site.call, 3, "opt_level"))
    return "O1" if given is None else str(given.value) if isinstance(given, ast.Constant) else ""


def _names(script: Script, node: ast.expr | None) -> set[str]:
    parts = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node] if node is not None else []
    return {script.key(part) for part in parts}


@check_of("HS056")
def _never_scaled(script: Script) -> Iterator[Hit]:
    made = list(_initialized(script))
    known = {name for each in made for name in _names(script, argument(each.call, 1, "optimizers"))}
    blocks = [n for n in walked(script.tree) if isinstance(n, ast.With) and "scale_loss" in ast.unparse(n.items[0])]
    scaled = {id(n) for block in blocks for n in walked(block)}
    for site in all_sites(script) if made else ():
        owner = script.owner(site.call)
        if method(site.call) != "backward" or owner in script.optimizers:
            continue
        if not all(_beside(site, each) for each in made):
            continue
        often = all(map(WINDOW.search, site.place.tests))
        if "scale_loss" not in script.text and (often or not any(each.place.branches for each in made)):
            yield Hit(site.call.lineno, f"`{ast.unparse(site.call)}` under amp.initialize, and the file scales no loss")
        elif "scale_loss" in script.text and often and id(site.call) not in scaled:
            steps = [
                script.owner(s.call) for s in sites(script, site.function)[site.index :] if method(s.call) == "step"
            ]
            steps = [optimizer for optimizer in steps if optimizer in script.optimizers]
            names = {script.key(i.optional_vars) for b in blocks for i in b.items if i.optional_vars is not None}
            if steps and steps[0] in known and owner not in names:
                what = f"`{ast.unparse(site.call)}` is not scaled, and amp.initialize has `{steps[0]}`"
                yield Hit(site.call.lineno, what)


def _beside(site: Site, made: Site) -> bool:
    """Return whether a call is made where amp.initialize is, as far as it is known: no condition is like its own."""
    return not set[str]().union(*map(words, site.place.tests)) & set[str]().union(*map(words, made.place.tests))


@check_of("HS057")
def _clips_copies(script: Script) -> Iterator[Hit]:
    for made in _initialized(script):
        masters = argument(made.call, None, "master_weights")
        models = _names(script, argument(made.call, 0, "models"))
        for site in all_sites(script) if masters is None and _level(script, made) == "O2" else ():
            first = site.call.args[0] if CLIPPING.fullmatch(script.called(site.call)) and site.call.args else None
            if first is None or method(first) != "parameters" or script.owner(first) not in models:
                continue
            if _beside(site, made):
                yield Hit(site.call.lineno, f"under O2 the optimizer steps fp32 copies, not `{ast.unparse(first)}`")


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
        for site in all_sites(script) if not made.place.branches else ():
            before = site.precedes(made) and not site.place.branches
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
    made = [each for each in _initialized(script) if not each.place.branches]
    late: set[str] = set()
    for site in all_sites(script) if made else ():
        if OPTIMIZERS.fullmatch(script.called(site.call)) and (name := script.target(site.statement)):
            if name in scaled and all(each.precedes(site) for each in made):
                late.add(name)
                yield Hit(site.call.lineno, f"`{name}` is made behind amp.initialize, which does not know it")
        elif _amp(script, site.call) == "scale_loss" and site.call.args[1:] and not late:
            if all(argument(each.call, 1, "optimizers") is None and not _unpacked(each.call) for each in made):
                name = ast.unparse(site.call.args[1])
                yield Hit(site.call.lineno, f"amp.initialize is given no optimizer, and `{name}` steps what is scaled")


def _unpacked(call: ast.Call) -> bool:
    return any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
