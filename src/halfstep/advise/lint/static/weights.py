"""Rules on low weights: a model that is made low by hand and trained as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import FORWARD, SCALED, STEP, UPDATE, ZERO, loop
from halfstep.advise.lint.static.optimizers import ADAMW, parameters_of, trains
from halfstep.advise.lint.static.regions import argument, sites
from halfstep.advise.lint.static.script import OPTIMIZERS, Script

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
class _Trained:
    """An optimizer over all parameters of a model."""

    model: str
    optimizer: str
    call: ast.Call


def _trained(script: Script) -> Iterator[_Trained]:
    """Yield the optimizers that are made of ``model.parameters()``."""
    for key, values in script.assigned.items():
        for value in values:
            call = value.node
            if value.index is None and isinstance(call, ast.Call) and OPTIMIZERS.fullmatch(script.called(call)):
                if owner := parameters_of(script, call):
                    yield _Trained(owner, key, call)


def _low_by_hand(script: Script, key: str) -> Iterator[tuple[ast.Call, str]]:
    """Yield (call, format) where an object is made low."""
    for call in script.methods_of(key):
        if form := script.low_format(call):
            yield call, form
    for value in script.assigned.get(key, []):
        if isinstance(value.node, ast.Call) and script.called(value.node).endswith("from_pretrained"):
            for keyword in value.node.keywords:
                if keyword.arg in ("torch_dtype", "dtype") and (form := script.format_of(keyword.value)) in LOW:
                    yield value.node, form


def _low_weights(script: Script) -> Iterator[tuple[_Trained, ast.Call, str]]:
    if script.uses_torch and not PRECISE_BEHIND.search(script.text):
        for trained in _trained(script):
            if "float32" not in script.text or not _wide_again(script, trained.model):
                for call, form in _low_by_hand(script, trained.model):
                    yield trained, call, form


def _wide_again(script: Script, key: str) -> bool:
    """Return whether a model is made fp32 too, in some place."""
    for call in script.methods_of(key):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method == "float" or (method == "to" and any(script.format_of(a) == "fp32" for a in call.args)):
            return True
    return False


def _half(script: Script) -> Iterator[Hit]:
    for trained, call, form in _low_weights(script):
        yield Hit(call.lineno, f"`{trained.model}` is made {form}, and `{trained.optimizer}` trains it as it is")


def _eps(script: Script) -> Iterator[Hit]:
    for trained, _, form in _low_weights(script):
        name = script.called(trained.call).rpartition(".")[2]
        if form != "fp16" or name not in WITH_EPS:
            continue
        given = script.constant(argument(trained.call, None, "eps"))
        value = given.value if isinstance(given, ast.Constant) else None if given is not None else WITH_EPS[name]
        if isinstance(value, float) and 0 < value <= ROUNDS_TO_ZERO:
            yield Hit(
                trained.call.lineno,
                f"eps={value:g} of `{trained.optimizer}` is 0 in fp16, the format of `{trained.model}`",
            )


def _unscaled_fp16(script: Script) -> Iterator[Hit]:
    low = {trained.optimizer: trained.model for trained, _, form in _low_weights(script) if form == "fp16"}
    for function in script.functions:
        for site in sites(script, function):
            owner, _, method = script.called(site.call).rpartition(".")
            if script.scalers.get(owner) == "torch" and method in ("step", "unscale_") and site.call.args:
                if (optimizer := script.key(site.call.args[0])) in low:
                    yield Hit(site.call.lineno, f"`{optimizer}` has the fp16 gradients of `{low[optimizer]}`")
                    return


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
