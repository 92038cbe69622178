"""Rules on weights and optimizers: low weights by hand, optimizers that were made too early, copies that are too low."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.advise.lint.rule import Hit, Rule
from halfstep.advise.lint.static.examples import FORWARD, SCALED, STEP, UPDATE, ZERO, loop
from halfstep.advise.lint.static.regions import argument, sites
from halfstep.advise.lint.static.script import OPTIMIZERS, Script

__all__ = ["WEIGHT_RULES"]

PRECISE_BEHIND = re.compile(
    r"hs\.|halfstep|apex|master_?(param|weight|cop)|deepspeed|peft|get_peft_model|lora|bitsandbytes|8bit|kahan|stochastic_round|FSDP|fully_shard"
    r"|FullyShardedDataParallel|offload|optimi\b|accelerat|torchao",
    re.IGNORECASE,
)
"""Words in a file in which something may keep precise values behind low weights, or train others than those."""

LOW_METHODS = {"half": "fp16", "bfloat16": "bf16"}

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

REPLACES = re.compile(
    r"(.*\.)?(resize_token_embeddings|get_peft_model|convert_to_float8_training|swap_linear_with_float8_linear)"
    r"|torch\.distributed\.(_composable\.)?fsdp\.(fully_shard|FullyShardedDataParallel)"
    r"|torch\.nn\.utils\.(weight_norm|spectral_norm|parametrizations\.\w+|parametrize\.register_parametrization)"
)
"""Functions that give a model parameters that an optimizer made before does not have."""

AVERAGE_NAME = re.compile(r"(^|[._])(ema|avg|average|averaged|shadow|swa)(_\w+)?$|_(ema|avg|shadow)$", re.IGNORECASE)


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
                if owner := _parameters_of(script, call):
                    yield _Trained(owner, key, call)


def _low_by_hand(script: Script, key: str) -> Iterator[tuple[ast.Call, str]]:
    """Yield (call, format) where an object is made low."""
    for call in script.methods_of(key):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method in LOW_METHODS and not call.args:
            yield call, LOW_METHODS[method]
        elif method == "to":
            for value in (*call.args, *(k.value for k in call.keywords if k.arg == "dtype")):
                if (form := script.format_of(value)) in ("fp16", "bf16"):
                    yield call, form
        elif method == "from_pretrained":
            continue
    for value in script.assigned.get(key, []):
        if isinstance(value.node, ast.Call) and script.called(value.node).endswith("from_pretrained"):
            for keyword in value.node.keywords:
                if keyword.arg in ("torch_dtype", "dtype") and (form := script.format_of(keyword.value)) in (
                    "fp16",
                    "bf16",
                ):
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


def _made_early(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        made: dict[str, tuple[str, int]] = {}
        found: dict[str, Hit] = {}
        for site in sites(script, function):
            call, statement = site.call, site.statement
            if isinstance(statement, ast.Assign) and (model := _parameters_of(script, call)):
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


def _parameters_of(script: Script, call: ast.Call) -> str:
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


def _low_average(script: Script) -> Iterator[Hit]:
    if not re.search(r"\.(mul_|lerp_|update|update_parameters|update_ema)\(|lerp|EMA|AveragedModel", script.text):
        return
    for function in script.functions if script.uses_torch else ():
        for site in sites(script, function):
            statement, call = site.statement, site.call
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            low = method in LOW_METHODS or (
                method == "to"
                and any(
                    script.format_of(a) in ("fp16", "bf16") for a in (*call.args, *(k.value for k in call.keywords))
                )
            )
            if not low or site.place.loops:
                continue
            if isinstance(statement, ast.Assign) and statement.value is call:
                name = script.key(statement.targets[0])
            elif isinstance(statement, ast.Expr) and statement.value is call:
                name = script.called(call).rpartition(".")[0]
            else:
                continue
            if AVERAGE_NAME.search(name) and _is_updated(script, name):
                yield Hit(call.lineno, f"the running average `{name}` is kept in {_format(script, call, method)}")


def _format(script: Script, call: ast.Call, method: str) -> str:
    if method in LOW_METHODS:
        return LOW_METHODS[method]
    return next(form for a in (*call.args, *(k.value for k in call.keywords)) if (form := script.format_of(a)))


def _is_updated(script: Script, name: str) -> bool:
    """Return whether a loop of the file goes through the parameters of an average, or calls its update."""
    for node in ast.walk(script.tree):
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
    for node in ast.walk(script.tree) if script.uses_torch else ():
        if isinstance(node, ast.Dict):
            values = [n for value in node.values for n in ast.walk(value) if isinstance(n, ast.Call)]
            if any(
                script.called(n).rpartition(".")[::2] in {(o, "state_dict") for o in script.optimizers} for n in values
            ):
                low = [v for v in node.values if any(isinstance(n, ast.Call) and _is_lowered(n) for n in ast.walk(v))]
                if low:
                    texts = " and ".join(f"`{ast.unparse(value)}`" for value in low)
                    yield Hit(low[0].lineno, f"{texts} beside the optimizer's state")


def _is_lowered(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in LOW_METHODS and not call.args


def _trains(*lines: str) -> str:
    """Return a script that makes a model by these lines and trains it in fp16 or bf16."""
    made = "\n".join(["import torch", "", "model = Net().cuda()", *lines])
    return f"{made}\nfor x, y in loader:\n    loss_fn(model(x), y).backward()\n    optimizer.step()\n    optimizer.zero_grad()"


ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)"

WEIGHT_RULES = (
    Rule(
        code="HS028",
        severity="warning",
        title="a model is made low by hand and trained",
        why="An update smaller than half an ulp of its weight changes nothing: in bf16 2**-9 of the weight. In fp16, Adam's "
        "second moment of gradients below 0.005 is 0 too.",
        fix="Keep fp32 weights and autocast, or let hs.prepare(model, optimizer, policy='O2') keep precise values behind low "
        "weights.",
        bad=_trains("model.bfloat16()", ADAMW),
        good=_trains(ADAMW),
        check=_half,
    ),
    Rule(
        code="HS029",
        severity="error",
        title="eps that is zero in fp16",
        why="Where the second moment is 0, Adam divides 0 by 0 (or a gradient by 0): the weights become NaN in the first steps.",
        fix="Keep fp32 weights and autocast; if weights must be fp16, eps from 1e-7 on is not zero and 1e-4 is safe.",
        bad=_trains("model.half()", ADAMW),
        good=_trains(ADAMW),
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
    Rule(
        code="HS031",
        severity="error",
        title="an optimizer made before parameters were replaced",
        why="It steps parameters that the model no longer has; the new ones keep their first values.",
        fix="Make the optimizer after the last change of the model's layers.",
        bad=_trains(ADAMW, "model.head = torch.nn.Linear(64, 10)"),
        good=_trains("model.head = torch.nn.Linear(64, 10)", ADAMW),
        check=_made_early,
    ),
    Rule(
        code="HS032",
        severity="error",
        title="a model wrapped before it is prepared",
        why="hs.prepare and apex's amp.initialize refuse a wrapped model: DistributedDataParallel would average the "
        "parameters that they replace.",
        fix="Prepare the model, then wrap it.",
        bad="import torch\nimport halfstep as hs\n\nmodel = torch.nn.parallel.DistributedDataParallel(net)\n"
        "model, optimizer, scaler = hs.prepare(model, optimizer, policy='O2')",
        good="import torch\nimport halfstep as hs\n\nnet, optimizer, scaler = hs.prepare(net, optimizer, policy='O2')\n"
        "model = torch.nn.parallel.DistributedDataParallel(net)",
        check=_wrapped_first,
    ),
    Rule(
        code="HS033",
        severity="warning",
        title="a running average in a low format",
        why="An average moves by a thousandth of a difference a step or less; bf16 has 8 significant bits and fp16 11, so it "
        "stands still.",
        fix="Keep the average in fp32.",
        bad="import copy, torch\n\nema = copy.deepcopy(model).bfloat16()\nfor x, y in loader:\n    train(model, x, y)\n"
        "    for average, p in zip(ema.parameters(), model.parameters()):\n        average.lerp_(p, 0.001)",
        good="import copy, torch\n\nema = copy.deepcopy(model)\nfor x, y in loader:\n    train(model, x, y)\n"
        "    for average, p in zip(ema.parameters(), model.parameters()):\n        average.lerp_(p, 0.001)",
        check=_low_average,
    ),
    Rule(
        code="HS048",
        severity="warning",
        title="a checkpoint of rounded weights",
        why="A run that goes on from it starts from weights rounded to the low format, and is not the one that was "
        "interrupted; what a small learning rate has added is lost.",
        fix="Save fp32 weights beside the optimizer's state, and low ones in a file of their own.",
        bad="import torch\n\nif resume:\n    optimizer.load_state_dict(torch.load('last.pt')['optimizer'])\n"
        "torch.save({'model': copy(model).half(), 'optimizer': optimizer.state_dict()}, 'last.pt')",
        good="import torch\n\nif resume:\n    optimizer.load_state_dict(torch.load('last.pt')['optimizer'])\n"
        "torch.save({'model': copy(model), 'optimizer': optimizer.state_dict()}, 'last.pt')",
        check=_low_checkpoint,
    ),
)  # fmt: skip
