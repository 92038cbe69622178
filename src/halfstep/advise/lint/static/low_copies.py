"""Rules on low copies of a model: running averages and checkpoints in a low format."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.regions import sites
from halfstep.advise.lint.static.script import Script, walked

__all__ = ["LOW_COPY_RULES"]

AVERAGE_NAME = re.compile(r"(^|[._])(ema|avg|average|averaged|shadow|swa)(_\w+)?$|_(ema|avg|shadow)$", re.IGNORECASE)


def _low_average(script: Script) -> Iterator[Hit]:
    if not re.search(r"\.(mul_|lerp_|update|update_parameters|update_ema)\(|lerp|EMA|AveragedModel", script.text):
        return
    for function in script.functions if script.uses_torch else ():
        for site in sites(script, function):
            statement, call = site.statement, site.call
            form = script.low_format(call)
            if not form or site.place.loops:
                continue
            if isinstance(statement, ast.Assign) and statement.value is call:
                name = script.key(statement.targets[0])
            elif isinstance(statement, ast.Expr) and statement.value is call:
                name = script.called(call).rpartition(".")[0]
            else:
                continue
            if AVERAGE_NAME.search(name) and _is_updated(script, name):
                yield Hit(call.lineno, f"the running average `{name}` is kept in {form}")


def _is_updated(script: Script, name: str) -> bool:
    """Return whether a loop of the file goes through the parameters of an average, or calls its update."""
    for node in walked(script.tree):
        if isinstance(node, (ast.For, ast.AsyncFor)) and f"{name}.parameters()" in ast.unparse(node.iter):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if script.name(node.func.value) == name and node.func.attr in (
                "update",
                "update_parameters",
                "lerp_",
                "mul_",
            ):
                return True
    return False


def _low_checkpoint(script: Script) -> Iterator[Hit]:
    if not re.search(r"load_state_dict|resume", script.text):
        return
    for node in walked(script.tree) if script.uses_torch else ():
        if isinstance(node, ast.Dict):
            values = [n for value in node.values for n in walked(value) if isinstance(n, ast.Call)]
            if {script.called(n) for n in values} & {f"{optimizer}.state_dict" for optimizer in script.optimizers}:
                low = [value for value in node.values if any(_lowers(script, n) for n in walked(value))]
                if low:
                    texts = " and ".join(f"`{ast.unparse(value)}`" for value in low)
                    yield Hit(low[0].lineno, f"{texts} beside the optimizer's state")


def _lowers(script: Script, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(script.low_format(node))


LOW_COPY_RULES = (
    Rule(
        code="HS033",
        severity="warning",
        title="a running average in a low format",
        why="An average moves by a thousandth of a difference a step or less; bf16 has 8 significant bits and "
        "fp16 11, so it stands still.",
        fix="Keep the average in fp32.",
        bad="""
import copy, torch

ema = copy.deepcopy(model).bfloat16()
for x, y in loader:
    train(model, x, y)
    for average, p in zip(ema.parameters(), model.parameters()):
        average.lerp_(p, 0.001)
""",
        good="""
import copy, torch

ema = copy.deepcopy(model)
for x, y in loader:
    train(model, x, y)
    for average, p in zip(ema.parameters(), model.parameters()):
        average.lerp_(p, 0.001)
""",
        check=_low_average,
    ),
    Rule(
        code="HS048",
        severity="warning",
        title="a checkpoint of rounded weights",
        why="A run that goes on from it starts from weights rounded to the low format, and is not the one that "
        "was interrupted; what a small learning rate has added is lost.",
        fix="Save fp32 weights beside the optimizer's state, and low ones in a file of their own.",
        bad="""
import torch

if resume:
    optimizer.load_state_dict(torch.load('last.pt')['optimizer'])
torch.save({'model': copy(model).half(), 'optimizer': optimizer.state_dict()}, 'last.pt')
""",
        good="""
import torch

if resume:
    optimizer.load_state_dict(torch.load('last.pt')['optimizer'])
torch.save({'model': copy(model), 'optimizer': optimizer.state_dict()}, 'last.pt')
""",
        check=_low_checkpoint,
    ),
)
