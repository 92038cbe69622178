"""Rules on low weights: a model that is made low by hand and trained as it is."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import FORWARD, SCALED, STEP, UPDATE, ZERO, loop
from halfstep.advise.lint.static.optimizers import ADAMW, parameters_of, trains
from halfstep.advise.lint.static.regions import Site, all_sites, argument, sites
from halfstep.advise.lint.static.script import Script

__all__ = ["WEIGHT_RULES"]

PRECISE_BEHIND = re.compile(
    r"hs\.|halfstep|apex|master_?(param|weight|cop)|deepspeed|peft|get_peft_model|lora|bitsandbytes|8bit|kahan|stochastic_round|FSDP|fully_shard"
    r"|FullyShardedDataParallel|offload|optimi\b|accelerat|torchao",
    re.IGNORECASE,
)
"""Words in a file in which something may keep precise values behind low weights, or train others than those."""

LOW = ("fp16", "bf16")

WITH_EPS = {
    "Adam": 1e-8,
    "AdamW": 1e-8,
    "NAdam": 1e-8,
    "RAdam": 1e-8,
    "RMSprop": 1e-8,
    "Adamax": 1e-8,
    "FusedAdam": 1e-8,
}
"""Class of an optimizer that divides by a root plus eps -> its default."""

ROUNDS_TO_ZERO = 2.0**-25
"""The largest number that fp16 rounds to 0: half of its smallest subnormal, 2**-24."""


@dataclass(frozen=True)
class _LowModel:
    """A model that a function makes low and then trains by an optimizer over all its parameters.

    Attributes:
        model: the model.
        lowered: the call that makes it low.
        form: "fp16" or "bf16".
        optimizer: its optimizer.
        made: the call that makes the optimizer.
    """

    model: str
    lowered: ast.Call
    form: str
    optimizer: str
    made: ast.Call


def _low_models(script: Script) -> Iterator[_LowModel]:
    if PRECISE_BEHIND.search(script.text):
        return
    for function in script.functions if script.uses_torch else ():
        calls = sites(script, function)
        for made in calls:
            model = parameters_of(script, made.call)
            if not model or not isinstance(made.statement, ast.Assign) or made.place.branches:
                continue
            optimizer = script.key(made.statement.targets[0])
            used = [site.call.lineno for site in calls if _uses(script, site, made, {model, optimizer})]
            if any(isinstance(c.func, ast.Attribute) and c.func.attr == "float" for c in script.methods_of(model)):
                continue  # made fp32 again in some place
            for site in calls:
                form = script.low_format(site.call) or _low_when_loaded(script, site.call)
                before = site.call.lineno < min(used, default=math.inf) and not site.place.branches
                if form and before and _made_low(script, site) == model:
                    yield _LowModel(model, site.call, form, optimizer, made.call)


def _uses(script: Script, site: Site, made: Site, keys: set[str]) -> bool:
    """Return whether a call trains: it stands behind the optimizer, in a loop or with the model as an argument."""
    if site.call.lineno <= made.call.lineno:
        return False
    return bool(site.place.loops) or any(script.name(a) in keys for a in site.call.args)


def _made_low(script: Script, site: Site) -> str:
    """Return the object that a call makes low: the one it is called on, or that its result is assigned to."""
    statement = site.statement
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Expr) and value is site.call and isinstance(site.call.func, ast.Attribute):
        return script.name(site.call.func.value)
    while isinstance(value, ast.Call) and value is not site.call and isinstance(value.func, ast.Attribute):
        value = value.func.value  # Net().half().cuda()
    return script.key(statement.targets[0]) if isinstance(statement, ast.Assign) and value is site.call else ""


def _low_when_loaded(script: Script, call: ast.Call) -> str:
    """Return the low format of ``from_pretrained(..., dtype=torch.float16)``; "" for other calls."""
    if not script.called(call).endswith("from_pretrained"):
        return ""
    forms = [script.format_of(keyword.value) for keyword in call.keywords if keyword.arg in ("torch_dtype", "dtype")]
    return forms[0] if forms and forms[0] in LOW else ""


def _half(script: Script) -> Iterator[Hit]:
    for low in _low_models(script):
        yield Hit(low.lowered.lineno, f"`{low.model}` is made {low.form}, and `{low.optimizer}` trains it as it is")


def _eps(script: Script) -> Iterator[Hit]:
    for low in _low_models(script):
        name = script.called(low.made).rpartition(".")[2]
        if low.form == "fp16" and name in WITH_EPS:
            given = script.constant(argument(low.made, None, "eps"))
            value = given.value if isinstance(given, ast.Constant) else None if given is not None else WITH_EPS[name]
            if isinstance(value, float) and 0 < value <= ROUNDS_TO_ZERO:
                what = f"eps={value:g} of `{low.optimizer}` is 0 in fp16, the format of `{low.model}`"
                yield Hit(low.made.lineno, what)


def _unscaled_fp16(script: Script) -> Iterator[Hit]:
    low = {each.optimizer: each.model for each in _low_models(script) if each.form == "fp16"}
    for site in all_sites(script):
        owner, _, method = script.called(site.call).rpartition(".")
        if script.scalers.get(owner) == "torch" and method in ("step", "unscale_") and site.call.args:
            if model := low.pop(script.key(site.call.args[0]), ""):
                yield Hit(site.call.lineno, f"`{script.key(site.call.args[0])}` has the fp16 gradients of `{model}`")


WEIGHT_RULES = (
    Rule(
        code="HS028",
        severity="warning",
        title="a model is made low by hand and trained",
        why="An update smaller than half an ulp of its weight changes nothing: in bf16 2**-9 of the weight. In "
        "fp16, Adam's second moment of gradients below 0.005 is 0 too.",
        fix="Keep fp32 weights and autocast, or let hs.prepare(model, optimizer, policy='O2') keep precise values "
        "behind low weights.",
        bad=trains("model.bfloat16()", ADAMW),
        good=trains(ADAMW),
        check=_half,
    ),
    Rule(
        code="HS029",
        severity="error",
        title="eps that is zero in fp16",
        why="Where the second moment is 0, Adam divides 0 by 0 (or a gradient by 0): the weights become NaN in "
        "the first steps.",
        fix="Keep fp32 weights and autocast; if weights must be fp16, eps from 1e-7 on is not zero and 1e-4 is "
        "safe.",
        bad=trains("model.half()", ADAMW),
        good=trains(ADAMW),
        check=_eps,
    ),
    Rule(
        code="HS030",
        severity="error",
        title="fp16 gradients under a GradScaler",
        why="torch raises 'Attempting to unscale FP16 gradients': the scaler expects fp32 weights.",
        fix="Delete .half() and keep autocast; hs.GradScaler unscales fp16 gradients too.",
        bad="import torch\n\nmodel = Net().cuda().half()\n" + ADAMW + "\n"
        + loop(FORWARD, SCALED, STEP, UPDATE, ZERO).partition("\n\n")[2],
        good="import torch\n\nmodel = Net().cuda()\n" + ADAMW + "\n"
        + loop(FORWARD, SCALED, STEP, UPDATE, ZERO).partition("\n\n")[2],
        check=_unscaled_fp16,
    ),
)  # fmt: skip
