"""Rules on optimizers: made before the model's parameters were replaced, or for a model wrapped too early."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.regions import argument, sites
from halfstep.advise.lint.static.script import OPTIMIZERS, Script

__all__ = ["ADAMW", "OPTIMIZER_RULES", "parameters_of", "trains"]

REPLACES = re.compile(
    r"(.*\.)?get_peft_model|torch\.nn\.utils\.weight_norm"
    r"|torch\.distributed\.(_composable\.)?fsdp\.(fully_shard|FullyShardedDataParallel)"
)
"""Functions that give a model parameters that an optimizer made before does not have."""


def _made_early(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        made: dict[str, tuple[str, int]] = {}
        found: dict[str, Hit] = {}
        for site in sites(script, function):
            call, statement = site.call, site.statement
            if isinstance(statement, ast.Assign) and (model := parameters_of(script, call)):
                found.pop(model, None)  # it is made again
                if not site.place.branches and not site.place.loops:
                    made[model] = (script.key(statement.targets[0]), call.lineno)
            elif script.called(call).endswith("add_param_group"):
                found.clear()
            elif (replaced := _replaced(script, call, statement, set(made))) and not site.place.branches:
                model, how = replaced
                optimizer, line = made.pop(model)
                found[model] = Hit(
                    line, f"`{optimizer}` has the parameters of `{model}` before line {call.lineno}: {how}"
                )
        yield from found.values()


def parameters_of(script: Script, call: ast.Call) -> str:
    """Return the model that an optimizer is made for with ``Class(model.parameters(), ...)``; "" for other calls."""
    first = argument(call, 0, "params") if OPTIMIZERS.fullmatch(script.called(call)) else None
    owner, _, method = script.called(first).rpartition(".") if first is not None else ("", "", "")
    return owner if method == "parameters" else ""


def _replaced(script: Script, call: ast.Call, statement: ast.stmt, models: set[str]) -> tuple[str, str] | None:
    """Return (model, how) if a call gives one of `models` other parameters."""
    name = script.called(call)
    owner = name.rpartition(".")[0]
    if REPLACES.fullmatch(name):
        first = script.name(call.args[0]) if call.args else ""
        for model in (owner, first):
            if model in models:
                return model, f"`{name}` makes new ones"
    if name.endswith("load_state_dict") and owner in models:
        assign = argument(call, 2, "assign")
        if isinstance(assign, ast.Constant) and assign.value:
            return owner, "load_state_dict(assign=True) puts others in their place"
    if isinstance(statement, ast.Assign) and statement.value is call and name.startswith("torch.nn."):
        target = statement.targets[0]
        root = script.name(target).rpartition(".")[0] if isinstance(target, ast.Attribute) else ""
        for model in models:
            if root == model or root.startswith(f"{model}."):
                return model, f"`{script.name(target)}` is a new layer"
    return None


def _wrapped_first(script: Script) -> Iterator[Hit]:
    wrappers = re.compile(r"torch\.nn\.(parallel\.)?(DistributedDataParallel|DataParallel)")
    for function in script.functions:
        wrapped: dict[str, int] = {}
        for site in sites(script, function):
            name, statement = script.called(site.call), site.statement
            if site.place.branches:
                continue
            if wrappers.fullmatch(name) and isinstance(statement, ast.Assign) and statement.value is site.call:
                wrapped[script.key(statement.targets[0])] = site.call.lineno
            elif name in ("halfstep.prepare", "apex.amp.initialize") and site.call.args:
                given = site.call.args[0]
                for part in given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]:
                    if (line := wrapped.get(script.key(part))) is not None:
                        yield Hit(site.call.lineno, f"`{script.key(part)}` was wrapped in line {line}, before `{name}`")


def trains(*lines: str) -> str:
    """Return a script that makes a model by these lines and trains it."""
    step = "    loss_fn(model(x), y).backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    return "\n".join(["import torch", "", "model = Net().cuda()", *lines, "for x, y in loader:", step])


ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)"

OPTIMIZER_RULES = (
    Rule(
        code="HS031",
        severity="error",
        title="an optimizer made before parameters were replaced",
        why="It steps parameters that the model no longer has; the new ones keep their first values.",
        fix="Make the optimizer after the last change of the model's layers.",
        bad=trains(ADAMW, "model.head = torch.nn.Linear(64, 10)"),
        good=trains("model.head = torch.nn.Linear(64, 10)", ADAMW),
        check=_made_early,
    ),
    Rule(
        code="HS032",
        severity="error",
        title="a model wrapped before it is prepared",
        why="hs.prepare and apex's amp.initialize refuse a wrapped model: DistributedDataParallel would average "
        "the parameters that they replace.",
        fix="Prepare the model, then wrap it.",
        bad="""
import torch
import halfstep as hs

model = torch.nn.parallel.DistributedDataParallel(net)
model, optimizer, scaler = hs.prepare(model, optimizer, policy='O2')
""",
        good="""
import torch
import halfstep as hs

net, optimizer, scaler = hs.prepare(net, optimizer, policy='O2')
model = torch.nn.parallel.DistributedDataParallel(net)
""",
        check=_wrapped_first,
    ),
)  # fmt: skip
