"""Rules on weights: models that are made low by hand, low copies of them, and optimizers of other parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.advise.lint.rule import Hit, check_of
from halfstep.advise.lint.static.regions import Site, all_sites, sites
from halfstep.advise.lint.static.scaling import assigned_in, is_call
from halfstep.advise.lint.static.script import Script, argument, method, parameters_of, walked
from halfstep.advise.lint.static.values import ROUNDS_TO_ZERO

PRECISE_BEHIND = re.compile(
    r"hs\.|halfstep|apex|master_?(param|weight|cop)|deepspeed|peft|get_peft_model|lora|bitsandbytes|8bit|kahan|stochastic_round|FSDP|fully_shard"
    r"|FullyShardedDataParallel|offload|optimi\b|accelerat|torchao",
    re.IGNORECASE,
)
"""Words in a file in which something may keep precise values behind low weights, or train others than those."""

WITH_EPS = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adamax", "FusedAdam"})
"""Classes of optimizers that divide by a root plus eps, 1e-8 unless it is given."""

REPLACES = re.compile(
    r"(.*\.)?get_peft_model|torch\.nn\.utils\.weight_norm"
    r"|torch\.distributed\.(_composable\.)?fsdp\.(fully_shard|FullyShardedDataParallel)"
)
"""Functions that give a model parameters that an optimizer made before does not have."""

WRAPPERS = re.compile(r"(torch\.nn|apex)\.(parallel\.)?(DistributedDataParallel|DataParallel)")
AVERAGE_NAME = re.compile(r"(^|[._])(ema|avg|average|averaged|shadow|swa)(_\w+)?$|_(ema|avg|shadow)$", re.IGNORECASE)


@dataclass(frozen=True)
class _LowModel:
    """A model that a function makes low and then trains by an optimizer over all its parameters."""

    model: str
    lowered: ast.Call  # makes it low
    form: str  # "fp16" or "bf16"
    optimizer: str
    made: ast.Call  # makes the optimizer


def _low_models(script: Script) -> Iterator[_LowModel]:
    if PRECISE_BEHIND.search(script.text):
        return
    for function in script.functions if script.uses_torch else ():
        calls = sites(script, function)
        for made in calls:
            model, optimizer = parameters_of(script, made.call), script.target(made.statement)
            if not model or not optimizer or made.place.branches or _made_wide(script, model):
                continue
            for site in calls:
                # calls that train: behind the optimizer, in a loop or with the model as an argument
                inside = site.place.loops or any(script.name(a) in (model, optimizer) for a in site.call.args)
                if site.index > made.index and inside:
                    break
                form = script.low_format(site.call) or _low_when_loaded(script, site.call)
                if form and not site.place.branches and made_low(script, site) == model:
                    yield _LowModel(model, site.call, form, optimizer, made.call)


def _made_wide(script: Script, model: str) -> bool:
    return any(method(call) == "float" for call in script.methods_of(model))


def made_low(script: Script, site: Site) -> str:
    """Return the object that a call makes low: the one it is called on, or that its result is assigned to."""
    statement = site.statement
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Expr) and value is site.call and isinstance(site.call.func, ast.Attribute):
        return script.name(site.call.func.value)
    while isinstance(value, ast.Call) and value is not site.call and isinstance(value.func, ast.Attribute):
        value = value.func.value  # Net().half().cuda()
    return script.target(statement) if value is site.call else ""


def _low_when_loaded(script: Script, call: ast.Call) -> str:
    """Return the low format of ``from_pretrained(..., dtype=torch.float16)``; "" for other calls."""
    if not script.called(call).endswith("from_pretrained"):
        return ""
    forms = [script.format_of(keyword.value) for keyword in call.keywords if keyword.arg in ("torch_dtype", "dtype")]
    return forms[0] if forms and forms[0] in ("fp16", "bf16") else ""


@check_of("HS028")
def _half(script: Script) -> Iterator[Hit]:
    for low in _low_models(script):
        yield Hit(low.lowered.lineno, f"`{low.model}` is made {low.form}, and `{low.optimizer}` trains it as it is")
    steppers = script.optimizers | script.scalers.keys()
    for function in script.functions if not PRECISE_BEHIND.search(script.text) else ():
        calls = sites(script, function) if script.uses_torch else ()
        steps = [s for s in calls if is_call(script, s.call, steppers, "step")]
        trained = {loop for step in steps for loop in step.place.loops}
        for site in calls:
            model, form, loops = script.owner(site.call), script.low_format(site.call), site.place.loops
            if not form or not loops or model not in script.models or any("==" in test for test in site.place.tests):
                continue
            if loops[-1] in trained and not assigned_in(script, loops[-1], model) and not _made_wide(script, model):
                what = f"`{model}` is made {form} itself, and the loop trains it as it is from here on"
                yield Hit(site.call.lineno, what)


@check_of("HS029")
def _eps(script: Script) -> Iterator[Hit]:
    for low in _low_models(script):
        if low.form == "fp16" and script.called(low.made).rpartition(".")[2] in WITH_EPS:
            given = argument(low.made, None, "eps")
            match script.constant(given) if given is not None else ast.Constant(1e-8):
                case ast.Constant(value=float(eps)) if 0 < eps <= ROUNDS_TO_ZERO:
                    what = f"eps={eps:g} of `{low.optimizer}` is 0 in fp16, the format of `{low.model}`"
                    yield Hit(low.made.lineno, what)


@check_of("HS030")
def _unscaled_fp16(script: Script) -> Iterator[Hit]:
    low = {each.optimizer: each.model for each in _low_models(script) if each.form == "fp16"}
    for site in all_sites(script):
        if method(site.call) in ("step", "unscale_") and script.scalers.get(script.owner(site.call)) == "torch":
            key = script.key(site.call.args[0]) if site.call.args else ""
            if model := low.pop(key, ""):
                yield Hit(site.call.lineno, f"`{key}` has the fp16 gradients of `{model}`")


@check_of("HS031")
def _made_early(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        made: dict[str, tuple[str, int]] = {}
        found: dict[str, Hit] = {}
        for site in sites(script, function):
            call, statement = site.call, site.statement
            if (optimizer := script.target(statement)) and (model := parameters_of(script, call)):
                found.pop(model, None)  # it is made again
                if not site.place.branches and not site.place.loops:
                    made[model] = optimizer, call.lineno
            elif script.called(call).endswith("add_param_group"):
                found.clear()
            elif (replaced := _replaced(script, call, statement, set(made))) and not site.place.branches:
                model, how = replaced
                optimizer, line = made.pop(model)
                what = f"`{optimizer}` has the parameters of `{model}` before line {call.lineno}: {how}"
                found[model] = Hit(line, what)
        yield from found.values()


def _replaced(script: Script, call: ast.Call, statement: ast.stmt, models: set[str]) -> tuple[str, str] | None:
    """Return (model, how) if a call gives one of `models` other parameters."""
    name = script.called(call)
    owner = name.rpartition(".")[0]
    if REPLACES.fullmatch(name):
        first = script.name(call.args[0]) if call.args else ""
        if given := [model for model in (owner, first) if model in models]:
            return given[0], f"`{name}` makes new ones"
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


@check_of("HS032")
def _wrapped_first(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        wrapped: dict[str, int] = {}
        for site in sites(script, function):
            name, statement = script.called(site.call), site.statement
            if site.place.branches:
                continue
            if WRAPPERS.fullmatch(name) and isinstance(statement, ast.Assign) and statement.value is site.call:
                wrapped[script.target(statement)] = site.call.lineno
            elif name in ("halfstep.prepare", "apex.amp.initialize") and site.call.args:
                given = site.call.args[0]
                for part in given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given]:
                    if (line := wrapped.get(script.key(part))) is not None:
                        yield Hit(site.call.lineno, f"`{script.key(part)}` was wrapped in line {line}, before `{name}`")


@check_of("HS033")
def _low_average(script: Script) -> Iterator[Hit]:
    if not re.search(r"\.(mul_|lerp_|update|update_parameters|update_ema)\(|lerp|EMA|AveragedModel", script.text):
        return
    for site in all_sites(script):
        form = script.low_format(site.call)
        if not form or site.place.loops or getattr(site.statement, "value", None) is not site.call:
            continue
        name = script.owner(site.call) if isinstance(site.statement, ast.Expr) else script.target(site.statement)
        if AVERAGE_NAME.search(name) and _is_updated(script, name):
            yield Hit(site.call.lineno, f"the running average `{name}` is kept in {form}")


def _is_updated(script: Script, name: str) -> bool:
    for node in walked(script.tree):
        if isinstance(node, (ast.For, ast.AsyncFor)) and f"{name}.parameters()" in ast.unparse(node.iter):
            return True
        if method(node) in ("update", "update_parameters", "lerp_", "mul_") and script.owner(node) == name:
            return True
    return False


@check_of("HS048")
def _low_checkpoint(script: Script) -> Iterator[Hit]:
    if not re.search(r"load_state_dict|resume", script.text):
        return
    for node in walked(script.tree) if script.uses_torch else ():
        values = node.values if isinstance(node, ast.Dict) else []
        low = [value for value in values if any(map(script.low_format, walked(value)))]
        if low and any(is_call(script, n, script.optimizers, "state_dict") for value in values for n in walked(value)):
            texts = " and ".join(f"`{ast.unparse(value)}`" for value in low)
            yield Hit(low[0].lineno, f"{texts} beside the optimizer's state")
