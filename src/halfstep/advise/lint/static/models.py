"""Rules on models: the regions around them, the formats of their weights and their optimizers, and NVIDIA Apex."""

import ast
import re
from collections.abc import Iterator

from halfstep.advise.lint.rule import PATTERNS, WORDS, Hit, check_of
from halfstep.advise.lint.static.paths import CLIPPING, MANAGERS, words
from halfstep.advise.lint.static.regions import Region, Site, all_sites, in_torch_regions, region_of, sites
from halfstep.advise.lint.static.scaling import WINDOW, assigned_in, is_call, loaded, saved
from halfstep.advise.lint.static.script import OPTIMIZERS, Function, Script, argument, method, parameters_of, walked
from halfstep.advise.lint.static.values import PRODUCTS, ROUNDS_TO_ZERO

PRECISE_BEHIND = PATTERNS["PRECISE_BEHIND"]
WRAPPERS = PATTERNS["WRAPPERS"]
FRAMEWORKS: dict[str, str] = WORDS["FRAMEWORKS"]


def _around_loop(site: Site, script: Script) -> bool:
    """Return whether a step of an optimizer is in a loop in a region of torch, which keeps low copies of weights."""
    region = site.place.torch_region
    if region is None or len(site.place.loops) <= region.loops or method(site.call) != "step":
        return False
    cached = argument(region.node, None, "cache_enabled")
    kept = not (isinstance(cached, ast.Constant) and not cached.value)
    return kept and script.owner(site.call) in script.optimizers | script.scalers.keys()


@check_of("HS019")
def _stale(script: Script) -> Iterator[Hit]:
    for site in all_sites(script):
        if _around_loop(site, script):
            what = f"the region is around the loop whose line {site.call.lineno} steps the optimizer"
            yield Hit(site.place.regions[-1].node.lineno, what)


@check_of("HS018")
def _backward(script: Script) -> Iterator[Hit]:
    stale = {site.place.regions[-1] for site in all_sites(script) if _around_loop(site, script)}
    for region, site in in_torch_regions(script):
        call = site.call
        own = method(call) == "backward" and not call.args and not MANAGERS.search(script.owner(call))
        if region not in stale and (own or script.called(call) == "torch.autograd.backward"):
            yield Hit(call.lineno, f"the backward pass is in the region of line {region.node.lineno}")


@check_of("HS020")
def _no_grad(script: Script) -> Iterator[Hit]:
    first: dict[tuple[Region, str], int] = {}
    for region, site in in_torch_regions(script):
        name = script.called(site.call)
        if name in script.models and site.place.no_grad:
            first.setdefault((region, name), site.call.lineno)
        elif line := first.pop((region, name), 0):
            yield Hit(line, f"`{name}` runs without gradients, then with them in line {site.call.lineno} of one region")


@check_of("HS023")
def _cross_entropy(script: Script) -> Iterator[Hit]:
    for region, site in in_torch_regions(script):
        if region.device != "cpu" and region.sure and script.operator(site.call) in WORDS["CROSS_ENTROPIES"]:
            yield Hit(site.call.lineno, "binary_cross_entropy in a region raises on CUDA")


@check_of("HS063")
def _not_entered(script: Script) -> Iterator[Hit]:
    for site in all_sites(script):
        if isinstance(site.statement, ast.Expr) and site.statement.value is site.call and region_of(script, site.call):
            yield Hit(site.call.lineno, f"`{script.called(site.call)}` is made here and entered by no block")


@check_of("HS024")
def _in_place(script: Script) -> Iterator[Hit]:
    for _, site in in_torch_regions(script):
        name, called = method(site.call), script.called(site.call)
        if PATTERNS["IN_PLACE"].fullmatch(name):
            yield Hit(site.call.lineno, f"`{name}` writes in place, and autocast leaves such operators alone")
        elif name and argument(site.call, None, "out") is not None and PRODUCTS.fullmatch(called):
            yield Hit(site.call.lineno, f"`{called}` with out=, which autocast leaves alone")


@check_of("HS025")
def _replicas(script: Script) -> Iterator[Hit]:
    for region, site in in_torch_regions(script):
        name = script.called(site.call)
        wrappers = set(filter(WRAPPERS.fullmatch, script.makers(name)))
        if region.dtype == "bf16" and region.device == "cuda" and wrappers == {"torch.nn.DataParallel"}:
            yield Hit(site.call.lineno, f"`{name}` is a DataParallel, whose threads autocast to fp16")


@check_of("HS027")
def _function(script: Script) -> Iterator[Hit]:
    if not any(region_of(script, call) for call in script.calls):
        return
    for node in walked(script.tree):
        if isinstance(node, ast.ClassDef) and any(script.name(b) == "torch.autograd.Function" for b in node.bases):
            methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            decorators = [*node.decorator_list, *(d for m in methods.values() for d in m.decorator_list)]
            names = [script.called(decorator) or script.name(decorator) for decorator in decorators]
            own = any("cast_inputs" in ast.unparse(decorator) for decorator in decorators)
            cast = own or any(name.endswith(("custom_bwd", "halfstep.operator")) for name in names)
            if not cast and "backward" in methods and _multiplies(script, methods["backward"]):
                yield Hit(node.lineno, f"the backward pass of `{node.name}` multiplies, and nothing casts its operands")


def _multiplies(script: Script, backward: ast.FunctionDef) -> bool:
    if re.search(r"\.to\(|\.type_as\(|\.float\(|\.half\(|autocast", ast.unparse(backward)):
        return False
    nodes = walked(backward)
    by_call = any(PRODUCTS.fullmatch(script.called(n)) or method(n) in ("mm", "matmul", "bmm") for n in nodes)
    return by_call or any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult) for n in nodes)


@check_of("HS021")
def _device(script: Script) -> Iterator[Hit]:
    for node in script.calls if script.uses_torch else ():
        region = region_of(script, node)
        if region is None or region.library != "torch" or re.search(r"(cuda|cpu)\.amp", script.called(node)):
            continue
        device = argument(region.node, 0, "device_type")
        if device is None and not _unpacked(region.node):
            yield Hit(region.node.lineno, "torch.autocast is given no device type")
        elif region.device != region.device.lower() or region.device.partition(":")[0] in WORDS["NO_DEVICE_TYPES"]:
            yield Hit(region.node.lineno, f"torch has no device type {region.device!r}")
        elif device is not None and script.called(script.constant(device)) == "torch.device":
            yield Hit(region.node.lineno, f"`{ast.unparse(device)}` is a torch.device, and autocast takes its `.type`")
    for inside, site in in_torch_regions(script):
        name = script.called(site.call)
        if inside.device == "cpu" and _on_cuda(script, name):
            what = f"`{name}` is on CUDA, and the region of line {inside.node.lineno} is for the CPU"
            yield Hit(site.call.lineno, what)


def _unpacked(call: ast.Call) -> bool:
    return any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)


def _on_cuda(script: Script, name: str) -> bool:
    places = [
        "cuda" if method(call) == "cuda" else ast.unparse(argument(call, 0, "device") or ast.Constant("")).strip("'")
        for call in (script.methods_of(name) if name in script.models else ())
        if method(call) in ("cuda", "to", "cpu")
    ]
    return bool(places) and all(re.fullmatch(r"cuda(:\d+)?", place) for place in places)


@check_of("HS022")
def _off(script: Script) -> Iterator[Hit]:
    for node in script.calls if script.uses_torch else ():
        region = region_of(script, node)
        if region is None or region.library != "torch" or not region.enabled or region.device not in ("cpu", "cuda"):
            continue
        if region.dtype in ("fp32", "fp64"):
            yield Hit(node.lineno, f"autocast to {region.dtype} is none: the block runs in the formats of its tensors")


@check_of("HS026")
def _deprecated(script: Script) -> Iterator[Hit]:
    tries = [node for node in walked(script.tree) if isinstance(node, ast.Try)]
    tries = [t for t in tries if any("torch.amp" in script.called(n) for s in t.body for n in walked(s))]
    fallback = {id(n) for block in tries for handler in block.handlers for n in walked(handler)}
    found: dict[str, list[int]] = {}
    for node in script.calls:
        if PATTERNS["DEPRECATED"].fullmatch(name := script.called(node)) and id(node) not in fallback:
            found.setdefault(name, []).append(node.lineno)
    for name, lines in found.items():
        first, *more = sorted(set(lines))
        also = f", also in line{'s' * (len(more) > 1)} {', '.join(map(str, more))}" if more else ""
        yield Hit(first, f"`{name}` is deprecated{also}")


LowModel = tuple[str, ast.Call, str, str, ast.Call]
"""A model, the call that makes it low, "fp16" or "bf16", the optimizer of all its parameters, what makes that."""


def _low_models(script: Script) -> Iterator[LowModel]:
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
                    yield model, site.call, form, optimizer, made.call


def _made_wide(script: Script, model: str) -> bool:
    return any(method(call) == "float" for call in script.methods_of(model))


def made_low(script: Script, site: Site) -> str:
    """Return the object that a call makes low: the one it is called on, or that its result is assigned to."""
    statement = site.statement
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Expr) and value is site.call and isinstance(site.call.func, ast.Attribute):
        return script.name(site.call.func.value)
    while isinstance(value, (ast.DictComp, ast.ListComp)):  # {name: p.clone().half() for name, p in ...}
        value = value.value if isinstance(value, ast.DictComp) else value.elt
    while value is not site.call and method(value) not in ("", "float"):
        value = value.func.value  # type: ignore[union-attr]  # it calls a method: Net().half().cuda()
    return script.target(statement) if value is site.call else ""


def _low_when_loaded(script: Script, call: ast.expr) -> str:
    """Return the low format of ``from_pretrained(..., dtype=torch.float16)``; "" for other calls."""
    if not isinstance(call, ast.Call) or not script.called(call).endswith("from_pretrained"):
        return ""
    forms = [script.format_of(keyword.value) for keyword in call.keywords if keyword.arg in ("torch_dtype", "dtype")]
    return forms[0] if forms and forms[0] in ("fp16", "bf16") else ""


@check_of("HS028")
def _half(script: Script) -> Iterator[Hit]:
    for model, lowered, form, optimizer, _ in _low_models(script):
        yield Hit(lowered.lineno, f"`{model}` is made {form}, and `{optimizer}` trains it as it is")
    steppers = script.optimizers | script.scalers.keys()
    defaults = [call for call in script.calls if script.called(call) == "torch.set_default_dtype" and call.args]
    default = script.format_of(defaults[0].args[0]) if len(defaults) == 1 else ""
    runs = any(method(call) == "backward" for call in script.calls) and not PRECISE_BEHIND.search(script.text)
    if default in ("fp16", "bf16") and runs and any(parameters_of(script, call) for call in script.calls):
        yield Hit(defaults[0].lineno, f"parameters are {default} from here on, and are trained as they are")
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
    for model, _, form, optimizer, made in _low_models(script):
        if form == "fp16" and script.called(made).rpartition(".")[2] in WORDS["WITH_EPS"]:
            match script.constant(argument(made, None, "eps") or ast.Constant(1e-8)):
                case ast.Constant(value=float(eps)) if 0 < eps <= ROUNDS_TO_ZERO:
                    yield Hit(made.lineno, f"eps={eps:g} of `{optimizer}` is 0 in fp16, the format of `{model}`")


@check_of("HS030")
def _unscaled_fp16(script: Script) -> Iterator[Hit]:
    low = {optimizer: model for model, _, form, optimizer, _ in _low_models(script) if form == "fp16"}
    for site in all_sites(script):
        if method(site.call) in ("step", "unscale_") and script.scalers.get(script.owner(site.call)) == "torch":
            key = script.key(site.call.args[0]) if site.call.args else ""
            if model := low.pop(key, ""):
                yield Hit(site.call.lineno, f"`{key}` has the fp16 gradients of `{model}`")
    texts = [ast.unparse(call) for call in script.calls if script.called(call).endswith("TrainingArguments")]
    sure = texts and all("fp16=True" in text for text in texts) and not PRECISE_BEHIND.search(script.text)
    for call in [call for call in script.calls if script.called(call).endswith("Trainer")] if sure else ():
        net = argument(call, 0, "model")
        made = script.constant(net)
        if made and net and _low_when_loaded(script, made) == "fp16" and not _made_wide(script, script.key(net)):
            yield Hit(made.lineno, "the model is loaded in fp16, and `fp16=True` scales the loss of fp32 parameters")
    loads = {_low_when_loaded(script, call) for call in script.calls if "Model" in script.called(call)}
    for call in script.calls if "torch" in script.scalers.values() and ".float()" not in script.text else ():
        match call:  # nn.Parameter(torch.zeros(..., dtype=torch.float16))
            case ast.Call(args=[ast.Call(keywords=given)], keywords=[]) if script.called(call) == "torch.nn.Parameter":
                named = [f"{script.key(k.value)}['dtype']" for k in given if k.arg is None]
                forms = [k.value for k in given if k.arg == "dtype"]
                forms += [value.node for name in named for value in script.assigned.get(name, [])]
                like = loads == {"fp16"} and all(script.name(form).endswith("weight.dtype") for form in forms)
                if forms and (like or all(script.format_of(form) == "fp16" for form in forms)):
                    yield Hit(call.lineno, "this parameter has fp16 gradients, and the file has a GradScaler")


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
    if PATTERNS["REPLACES"].fullmatch(name):
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
    classes = {id(n): c.name for c in walked(script.tree) if isinstance(c, ast.ClassDef) for n in c.body}
    for site in all_sites(script):
        form = script.low_format(site.call)
        name, _, item = made_low(script, site).partition("[")  # shadow[name] = p.clone().half()
        if not form or not name or (site.place.loops and not item):
            continue
        own = name.startswith("self.") and re.search(r"EMA|Ema|Averag|Shadow", classes.get(id(site.function), ""))
        if (own or PATTERNS["AVERAGE_NAME"].search(name)) and _is_updated(script, name):
            yield Hit(site.call.lineno, f"the running average `{name}` is kept in {form}")


def _is_updated(script: Script, name: str) -> bool:
    for node in walked(script.tree):
        if isinstance(node, (ast.For, ast.AsyncFor)) and f"{name}.parameters()" in ast.unparse(node.iter):
            return True
        if method(node) in ("update", "update_parameters", "lerp_", "mul_"):
            owner = node.func.value  # type: ignore[attr-defined]  # it calls a method
            keys = [script.key(one or owner).partition("[")[0] for one in (owner, script.constant(owner))]
            if name in (*keys, *map(script.own, keys)):
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
        if method(site.call) != "backward" or owner in script.optimizers or not all(_beside(site, m) for m in made):
            continue
        often = all(map(WINDOW.search, site.place.tests))
        if "scale_loss" not in script.text and (often or not any(each.place.branches for each in made)):
            yield Hit(site.call.lineno, f"`{ast.unparse(site.call)}` under amp.initialize, and the file scales no loss")
        elif "scale_loss" in script.text and often and id(site.call) not in scaled:
            later = [s.call for s in sites(script, site.function)[site.index :] if method(s.call) == "step"]
            steps = [optimizer for call in later if (optimizer := script.owner(call)) in script.optimizers]
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
    for line in saved(script) if "state_dict" not in used else ():
        yield Hit(line, "the optimizer's state is saved here, and `amp.state_dict()` nowhere")
    for line in loaded(script) if "load_state_dict" not in used else ():
        yield Hit(line, "the optimizer's state is loaded here, and that of amp nowhere")


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
    delays = [argument(call, None, "delay_unscale") for call in script.calls if _amp(script, call) == "scale_loss"]
    if delays and all(isinstance(delay, ast.Constant) and delay.value is True for delay in delays):
        for site in [s for s in all_sites(script) if is_call(script, s.call, script.optimizers, "step")]:
            yield Hit(site.call.lineno, "the gradients are still scaled: each amp.scale_loss has delay_unscale=True")
    for node in walked(script.tree):
        if isinstance(node, ast.With) and any(_amp(script, item.context_expr) == "scale_loss" for item in node.items):
            for call in [n for statement in node.body for n in walked(statement) if isinstance(n, ast.Call)]:
                if is_call(script, call, script.optimizers, "step") or CLIPPING.fullmatch(script.called(call)):
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
            if all(argument(m.call, 1, "optimizers") is None and not _unpacked(m.call) for m in made):
                name = ast.unparse(site.call.args[1])
                yield Hit(site.call.lineno, f"amp.initialize is given no optimizer, and `{name}` steps what is scaled")


def _managed(script: Script) -> Iterator[tuple[str, Site, set[Function]]]:
    """Yield the calls of a file that leaves scaling in fp16 to one object, with its maker and where that is called."""
    made = [(name, c) for c in script.calls if (name := script.called(c).rpartition(".")[2]) in FRAMEWORKS]
    given = [(name, argument(call, None, FRAMEWORKS[name])) for name, call in made]
    texts = {(name, ast.unparse(script.constant(value) or value)) for name, value in given if value is not None}
    for by, text in texts if len(texts) == 1 and not script.scalers else ():
        every = [s for s in all_sites(script) if getattr(s.function, "name", "") != "backward"]  # a hook of Lightning
        calls = {s.function for s in every if method(s.call) in ("backward", "manual_backward") and s.call.args}
        yield from ((by, site, calls) for site in every if PATTERNS["IN_FP16"].fullmatch(text))


@check_of("HS066")
def _past(script: Script) -> Iterator[Hit]:
    for by, site, calls in _managed(script):
        plain = method(site.call) == "backward" and not site.call.args and not MANAGERS.search(script.owner(site.call))
        own = by != "Trainer" or "automatic_optimization = False" in script.text
        if plain and own and not (calls and site.place.branches):
            yield Hit(site.call.lineno, f"`{ast.unparse(site.call)}`, and the loss scale of `{by}` is not in it")


@check_of("HS067")
def _clipped(script: Script) -> Iterator[Hit]:
    for by, site, calls in _managed(script) if "unscale_gradients" not in script.text else ():
        hook = getattr(site.function, "name", "") == "on_after_backward"
        scaled = hook if by == "Trainer" else by != "initialize" and site.function in calls
        if scaled and CLIPPING.fullmatch(script.called(site.call)):
            yield Hit(site.call.lineno, f"these gradients are multiplied by the loss scale of `{by}`")
