"""Rules on training loops: the order of calls of a loss scaler, its life and its scale; gradients that stay; waits."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from halfstep.advise.lint.rule import PATTERNS, Hit, check_of
from halfstep.advise.lint.static.paths import BACKWARDS, CLIPPING, Op, Verdicts, judged, on_paths, plain, words
from halfstep.advise.lint.static.regions import all_sites, region_of, sites
from halfstep.advise.lint.static.script import SCALERS, Script, argument, method, stored, walked

SKIPS = PATTERNS["SKIPS"]
LOW = re.compile(r"float16(?!\w)|\bhalf\b|fp16")
TRAIN_STEPS = ("halfstep.TrainStep", "halfstep.step.TrainStep")
FEW_STEPS = 20  # with fewer steps between two growths of a scale more than a twentieth of all steps overflows
WINDOW = re.compile(r"%|accum|last|sync|boundary|window")
STEPS = ("step", "scaler_step", "escape")
UNKNOWN = frozenset({"escape", "grads", "get_scale", "managed_backward"})  # behind them no scale is known


def ends_window(op: Op) -> bool:
    """Return whether an operation stands under a condition that is true in some micro-batches."""
    return any(map(WINDOW.search, op.place.tests))


def in_each(op: Op, backward: Op) -> bool:
    """Return whether an operation runs in every iteration with that backward pass, or in none of them."""
    varying = stored(*op.place.loops[-1:])
    more = [branch for branch in op.place.branches if branch not in backward.place.branches]
    tests = [ast.unparse(choice.test) for choice, _ in more]
    return not any("%" in test or "(" in test or words(test) & varying for test in tests)


@on_paths("HS002", library="torch")
def _update_twice(path: Sequence[Op]) -> Verdicts:
    state: dict[str, str] = {}
    for number, op in enumerate(path):
        if op.kind in ("scaler_step", "unscale"):
            state[op.scaler] = "stepped"
        elif op.kind == "escape" and op.scaler:
            state[op.scaler] = "unknown"
        elif op.kind == "new_scaler":
            state.pop(op.scaler, None)
        elif op.kind == "update" and isinstance(op.call, ast.Call) and not (op.call.args or op.call.keywords):
            name, before = plain(op.scaler), state.get(op.scaler, "")
            later = any(o.kind == "scaler_step" and o.scaler == op.scaler for o in path[number:])
            first = f"`{name}.update()` runs before the first `{name}.step`" if not before and later else ""
            twice = f"`{name}.update()` runs twice with no `{name}.step` between"
            yield op, twice if before == "updated" else first
            state[op.scaler] = "updated"


@on_paths("HS003", library="torch")
def _unscale_twice(path: Sequence[Op]) -> Verdicts:
    done: dict[tuple[str, str], str] = {}
    backward: Op | None = None
    for op in path:
        key = (op.scaler, op.target)
        if op.kind == "scaled_backward":
            backward = op
        elif op.kind == "unscale":
            name, target, before = plain(op.scaler), plain(op.target), done.get(key)
            when = f"after `{name}.step({target})`," if before == "step" else "a second time"
            what = f"`{name}.unscale_({target})` runs {when} before `{name}.update()`"
            steps_in_some = any(o.kind == "scaler_step" and ends_window(o) for o in path)
            always = backward is not None and in_each(op, backward)
            if before and (always or not steps_in_some):
                yield op, what
            elif not always or not steps_in_some:  # else a step comes between in some iterations, and not in others
                yield op, ""
            done[key] = "unscale"
        elif op.kind == "scaler_step":
            done[key] = "step"
        elif op.kind in ("update", "escape", "new_scaler"):
            done = {k: v for k, v in done.items() if k[0] != op.scaler and op.target != k[1]}


@on_paths("HS004", library="torch")
def _step_without_update(path: Sequence[Op]) -> Verdicts:
    done: set[tuple[str, str]] = set()
    for op in path:
        if op.kind == "scaler_step":
            name, target = plain(op.scaler), plain(op.target)
            what = f"`{name}.step({target})` runs again with no `{name}.update()` since the last time"
            yield op, what if (op.scaler, op.target) in done else ""
            done.add((op.scaler, op.target))
        elif op.kind in ("update", "escape", "new_scaler"):
            done = {(scaler, target) for scaler, target in done if scaler != op.scaler and target != op.target}


@on_paths("HS005")
def _unprotected_step(path: Sequence[Op]) -> Verdicts:
    scaler, sure, alone, stepped = "", False, False, set[str]()
    only = all(op.kind not in UNKNOWN and op.kind != "plain_backward" for op in path)
    for op in path:
        if op.kind == "scaled_backward":
            sure = sure if scaler else True
            scaler, alone, stepped = op.scaler, False, set()
        elif op.kind in UNKNOWN or op.kind in ("unscale", "plain_backward"):
            scaler, sure = scaler or op.scaler or "?", False
        elif op.kind == "scaler_step":
            stepped.add(op.target)
            alone = True  # the scaled gradients may be those of this optimizer alone
        elif op.kind == "step" and op.target not in stepped:
            what = f"`{plain(op.target)}.step()` is given gradients of a loss scaled by `{plain(scaler)}`"
            yield op, what if sure and (not alone or (only and op.of)) else ""
        elif op.kind in ("iteration", "zero"):
            scaler, sure = "", False


@on_paths("HS006")
def _second_step(path: Sequence[Op]) -> Verdicts:
    stepped: set[str] = set()
    for op in path:
        if op.kind == "scaler_step":
            stepped.add(op.target)
        elif op.kind == "step":
            yield op, f"`{plain(op.target)}.step()` runs after the scaler's step of it" if op.target in stepped else ""
        elif op.kind in BACKWARDS or op.kind in ("zero", "iteration", "escape"):
            stepped = set()


@check_of("HS007")
def _forgotten_scale(script: Script) -> Iterator[Hit]:
    for node in [n for n in walked(script.tree) if isinstance(n, ast.Expr)]:
        if method(node.value) in ("scale", "scale_loss") and (owner := script.owner(node.value)) in script.scalers:
            yield Hit(node.value.lineno, f"the result of `{owner}.scale`, the scaled loss, is not used")
    some = any(isinstance(n, ast.Attribute) and n.attr in ("scale", "scale_loss") for n in walked(script.tree))
    yield from judged(script, partial(_never_scaled, some=some))
    own = {key for key in script.scalers if key.endswith("]") or any(map(SCALERS.fullmatch, script.makers(key)))}
    used = {script.owner(call).rpartition(".")[2] for call in script.calls if method(call) == "scale"}
    idle = {key for key in own if key.rpartition(".")[2] not in used}
    yield from judged(script, partial(_scaled_by_another, idle=idle), library="torch") if idle else ()


def _scaled_by_another(path: Sequence[Op], idle: set[str]) -> Verdicts:
    scaled = [op.scaler for op in path if op.kind == "scaled_backward"]
    for op in path if scaled and all(op.kind not in UNKNOWN for op in path) else ():
        if op.kind == "scaler_step" and plain(op.scaler) in idle:
            yield op, f"`{plain(op.scaler)}` steps and scales no loss in this file, `{plain(scaled[0])}` does"


def _never_scaled(path: Sequence[Op], some: bool) -> Verdicts:
    backward: Op | None = None
    for op in path:
        if op.kind == "plain_backward":
            backward = op if op.of or not some else None
        elif op.kind in UNKNOWN or (some and op.kind in ("scaled_backward", "zero", "iteration", "step")):
            yield from [(backward, "")] if backward and op.kind == "step" else ()
            backward = None
        elif op.kind == "scaler_step" and backward and "closure" not in ast.unparse(op.call):
            why = "it is not scaled" if some else "the file scales no loss"
            yield backward, f"`{backward.target}.backward()` before `{plain(op.scaler)}.step`, and {why}"


@on_paths("HS008")
def _update_between(path: Sequence[Op]) -> Verdicts:
    scaled, updated, stepped = set[str](), set[str](), set[str]()  # scalers of a loss, those updated since; optimizers
    for op in path:
        if op.kind in ("scale", "scaled_backward"):
            scaled, updated, stepped = scaled | {op.scaler}, updated - {op.scaler}, set()
        elif op.kind == "update":
            updated.add(op.scaler)
        elif op.kind in UNKNOWN or op.kind == "new_scaler":
            scaled, updated = set(), set()
        elif op.kind == "scaler_step":
            bad, name = op.scaler in scaled & updated and stepped and op.target not in stepped, plain(op.scaler)
            what = f"`{name}.step({plain(op.target)})` follows `{name}.update()`, and its loss was scaled before it"
            yield op, what if bad else ""
            stepped.add(op.target)


@check_of("HS009")
def _closure(script: Script) -> Iterator[Hit]:
    for call in script.calls:
        if method(call) == "step" and script.scalers.get(owner := script.owner(call)) == "torch":
            if argument(call, 1, "closure") is not None:
                yield Hit(call.lineno, f"`{owner}.step` is given a closure")


@on_paths("HS010")
def _scheduler(path: Sequence[Op]) -> Verdicts:
    step: Op | None = None
    for op in path:
        if op.kind == "scaler_step":
            step = op
        elif op.kind in ("iteration", "scaled_backward"):
            step = None
        elif op.kind == "schedule" and step is not None:
            more = set(op.place.branches) - set(step.place.branches)
            told = any(o.kind == "get_scale" for o in path) or any(SKIPS.search(ast.unparse(c.test)) for c, _ in more)
            what = f"`{plain(op.target)}.step()` also runs after a step that `{plain(step.scaler)}` skipped"
            yield op, what if op.place.loops == step.place.loops and not told else ""


@check_of("HS011")
def _made_in_loop(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        steps = [s for s in sites(script, function) if is_call(script, s.call, script.scalers, "step") and s.call.args]
        for site in sites(script, function):
            key = script.target(site.statement) if SCALERS.fullmatch(script.called(site.call)) else ""
            for step in steps if key else ():
                shared = [loop for loop in site.place.loops if loop in step.place.loops and not site.place.branches]
                own = shared and script.owner(step.call) == key
                if own and not assigned_in(script, shared[-1], script.key(step.call.args[0])):
                    yield Hit(site.call.lineno, f"`{key}` is made anew in each iteration of the loop in which it steps")
                    break


def assigned_in(script: Script, loop: ast.stmt, key: str) -> bool:
    """Return whether a loop assigns an object: another training begins in each iteration."""
    return any(isinstance(getattr(n, "ctx", None), ast.Store) and script.key(n) == key for n in walked(loop))


def saved(script: Script) -> Iterator[int]:
    """Yield the lines where an optimizer's state is saved, the first of each thing that is."""
    saves = [call for call in script.calls if script.called(call) == "torch.save" and call.args]
    for call in {ast.unparse(call.args[0]): call for call in reversed(saves)}.values():
        nodes = [n for part in script.results(call.args[0]) for n in walked(part)]
        if any(is_call(script, n, script.optimizers, "state_dict") for n in nodes):
            yield call.lineno
    loops = any(isinstance(n, ast.DictComp) and method(n.value) == "state_dict" for n in walked(script.tree))
    own = script.classes | script.mentions.keys()
    for node in walked(script.tree) if loops and saves else ():  # {name: part.state_dict() for name, part in parts}
        given = [k.value for k in node.keywords] if script.called(node) in own else []  # type: ignore[attr-defined]
        parts = set(map(script.key, node.values if isinstance(node, ast.Dict) else given))
        if len(parts) > 1 and parts & script.optimizers and not parts & script.scalers.keys():
            yield node.lineno  # type: ignore[attr-defined]


def loaded(script: Script) -> Iterator[int]:
    """Yield the lines where an optimizer's state is loaded that no optimizer of the file has just returned."""
    for call in script.calls:
        own = any(is_call(script, n, script.optimizers, "state_dict") for a in call.args for n in walked(a))
        if is_call(script, call, script.optimizers, "load_state_dict") and not own:
            yield call.lineno


@check_of("HS012")
def _saved_without(script: Script) -> Iterator[Hit]:
    for line in saved(script) if _lost(script, "state_dict", r"save|checkpoint|ckpt") else ():
        yield Hit(line, f"the optimizer's state is saved here, and `{next(iter(script.scalers))}.state_dict()` nowhere")


@check_of("HS013")
def _loaded_without(script: Script) -> Iterator[Hit]:
    loads = [
        (script.owner(c), ast.unparse(c.args[0]), c) for c in script.calls if method(c) == "load_state_dict" and c.args
    ]
    for scaler, state, call in loads:
        if scaler in script.scalers and any(o in script.optimizers and state == other for o, other, _ in loads):
            yield Hit(call.lineno, f"`{scaler}` loads the state of an optimizer")
    for line in loaded(script) if _lost(script, "load_state_dict", r"load|resume") else ():
        yield Hit(line, f"the optimizer's state is loaded here, and that of `{next(iter(script.scalers))}` nowhere")


def _lost(script: Script, called: str, pattern: str) -> bool:
    """Return whether torch's scaler steps, nothing calls that method of it, and no function of such a name has it."""
    made = {method(call) for call in script.calls if script.owner(call) in script.scalers}
    those = [call for call in script.calls if re.search(pattern, script.called(call), re.IGNORECASE)]
    given = {script.name(a) for call in those for a in (*call.args, *(k.value for k in call.keywords))}
    known = "step" in made and called not in made and given.isdisjoint(script.scalers)
    return known and "torch" in script.scalers.values()


@check_of("HS069")
def _by_hand(script: Script) -> Iterator[Hit]:
    stepped = any(is_call(script, call, script.optimizers, "step") for call in script.calls)
    for call in script.calls if stepped and LOW.search(script.text.replace("bfloat16", "")) else ():
        loss = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" else None
        for made in [loss, *script.values(script.key(loss))] if loss is not None else ():
            match made:
                case ast.BinOp(op=ast.Mult(), right=right) if isinstance(script.constant(right), ast.Constant):
                    name = script.key(right).rpartition(".")[2]
                    lines = [line for line in script.text.splitlines() if not re.search(r"print|\blog", line)]
                    used = re.compile(rf"(/=? *|[(,] *|\w=)([\w.]+\.)?{name}\b(?! *=)")  # divides, or is given away
                    if re.search(r"(?i)scal", name) and not any(map(used.search, lines)):
                        yield Hit(call.lineno, f"the loss is multiplied by `{name}`, and nothing divides by it")


@check_of("HS070")
def _one_device(script: Script) -> Iterator[Hit]:
    made = {script.called(call).rpartition(".")[2]: call for call in script.calls}
    names = {"FullyShardedDataParallel", "GradScaler", "MixedPrecision", "ShardedGradScaler"} & made.keys()
    low = script.format_of(argument(made["MixedPrecision"], 0, "param_dtype")) if len(names) == 3 else ""
    if low == "fp16" and "ShardedGradScaler" not in names:
        yield Hit(made["GradScaler"].lineno, "it looks at the gradients of its own rank, and FSDP shards them")


def is_call(script: Script, node: ast.AST, owners: Collection[str], name: str) -> bool:
    """Return whether `node` calls a method of one of `owners`."""
    return method(node) == name and script.owner(node) in owners


@check_of("HS014")
def _fp16_without(script: Script) -> Iterator[Hit]:
    made = [ast.unparse(call) for call in script.calls if SCALERS.fullmatch(script.called(call))]
    if PATTERNS["OTHER_SCALING"].search(script.text) and not (made and all("enabled=False" in c for c in made)):
        return
    forwards = [s for s in all_sites(script) if getattr(s.function, "name", "") == "forward"]
    inside = [r for s in forwards if (r := s.place.torch_region) is not None and r.enabled and not s.place.no_grad]
    steppers = script.optimizers | script.scalers.keys()
    for function in script.functions:
        calls = sites(script, function)
        losses = [s.call.func for s in calls if method(s.call) == "backward" and not s.call.args]
        by_hand = any(isinstance(getattr(getattr(loss, "value", None), "op", None), ast.Mult) for loss in losses)
        if not losses or by_hand or not any(is_call(script, s.call, steppers, "step") for s in calls):
            continue
        for region in dict.fromkeys([*(s.place.torch_region for s in calls if not s.place.no_grad), *inside]):
            if region is not None and region.dtype == "fp16":
                yield Hit(region.node.lineno, "the forward pass runs in fp16, and no loss is scaled in this file")


@check_of("HS015")
def _scaler_without(script: Script) -> Iterator[Hit]:
    for call in script.calls:
        match argument(call, None, "enabled") if SCALERS.fullmatch(script.called(call)) else None:
            case ast.Compare(ops=[ast.Eq() | ast.Is() | ast.NotEq() | ast.IsNot() as asked], comparators=[other]):
                low = "bf(loat)?16" if isinstance(asked, (ast.Eq, ast.Is)) else r"(\b|_)(fp|float)16"
                if re.search(rf"{low}\W*$", ast.unparse(other)):
                    yield Hit(call.lineno, "the scaler is on for bf16, and off for fp16")
    formats = {region.dtype for call in script.calls if (region := region_of(script, call)) is not None}
    for call in script.calls if formats == {"bf16"} and not LOW.search(script.text.replace("bfloat16", "")) else ():
        on = not re.search("enabled=(?!True)", ast.unparse(call))
        if on and not call.args[1:] and SCALERS.fullmatch(name := script.called(call)) and "torch" in name:
            yield Hit(call.lineno, "every region of the file is bf16, and a loss is scaled")


@check_of("HS016")
def _penalty(script: Script) -> Iterator[Hit]:
    for function in script.functions if "inv_scale" not in script.text else ():
        calls = [site.call for site in sites(script, function)]
        if any(method(c) in ("get_scale", "unscale", "_scale_grads_") for c in calls):
            continue
        for call in [call for call in calls if script.called(call) == "torch.autograd.grad"]:
            outputs = script.constant(argument(call, 0, "outputs"))
            if outputs and any(is_call(script, node, script.scalers, "scale") for node in walked(outputs)):
                yield Hit(call.lineno, "gradients of a scaled loss are used as they are")


@check_of("HS049")
def _grows_often(script: Script) -> Iterator[Hit]:
    for call in script.calls:
        if SCALERS.fullmatch(name := script.called(call)) and name.startswith("torch."):
            match script.constant(argument(call, None, "growth_interval")):
                case ast.Constant(value=int(interval)) if interval < FEW_STEPS:
                    yield Hit(call.lineno, f"the scale doubles after {interval} good step{'s' * (interval != 1)}")


@on_paths("HS017")
def _read(path: Sequence[Op]) -> Verdicts:
    divided = any(op.kind == "get_scale" for op in path)
    for op in path:
        if op.kind == "read":
            yield op, "" if divided else f"`{op.target}` is the loss times the scale of `{plain(op.scaler)}`"


@check_of("HS051")
def _update_in_micro_batch(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        calls = [s for s in sites(script, function) if script.scalers.get(script.owner(s.call)) == "torch"]
        for site in [s for s in calls if method(s.call) == "update" and s.place.loops and not s.call.args]:
            owner, outer = script.owner(site.call), set(site.place.branches)
            tried = [s for s in calls if script.owner(s.call) == owner and method(s.call) in ("step", "unscale_")]
            inner = [[c for c, _ in s.place.branches if (c, True) not in outer] for s in tried]
            apart = any(map(WINDOW.search, site.place.tests)) or any(s.place.loops != site.place.loops for s in tried)
            if tried and all(any(WINDOW.search(ast.unparse(c.test)) for c in more) for more in inner) and not apart:
                yield Hit(site.call.lineno, f"`{owner}.update()` runs in every micro-batch, `{owner}.step` in some")


@on_paths("HS052", library="torch")
def _left_unscaled(path: Sequence[Op]) -> Verdicts:
    unscaled: Op | None = None
    for op in path:
        if op.kind == "unscale":
            unscaled = op
        elif op.kind in ("update", "escape", "new_scaler", "iteration"):
            unscaled = None
        elif op.kind in ("continue", "return") and unscaled is not None:
            name, goes = plain(unscaled.scaler), "loop goes on" if op.kind == "continue" else "method returns"
            what = f"the {goes} behind `{name}.unscale_`, with no `{name}.update()`"
            steps = any(o.kind == "scaler_step" and o.scaler == unscaled.scaler for o in path)
            if op.kind == "continue" or (steps and op.place.loops and name.startswith("self.")):  # it outlives the call
                yield replace(op, scaler=unscaled.scaler), what


@check_of("HS053")
def _raises_instead(script: Script) -> Iterator[Hit]:
    for site in all_sites(script):
        call = site.call
        match argument(call, 3, "error_if_nonfinite") if CLIPPING.fullmatch(script.called(call)) else None:
            case ast.Constant(value=True):
                if any(is_call(script, s.call, script.scalers, "step") for s in sites(script, site.function)):
                    yield Hit(call.lineno, "the first overflow, which the scaler would skip, raises here")


def _while_scaled(path: Sequence[Op], kind: str, what: str) -> Verdicts:
    """Yield the operations of a kind between a scaled backward pass and the scaler's step, unless it unscales."""
    scaler, unscaled, waiting = "", set[str](), list[tuple[Op, bool]]()
    behind = UNKNOWN if kind == "clip" else UNKNOWN - {"grads"}
    for op in path:
        if op.kind == "scaled_backward":
            scaler, unscaled = op.scaler, set()
        elif op.kind == "unscale" and kind == "clip":
            unscaled.add(plain(op.target))
        elif op.kind in ("unscale", "plain_backward", "zero", "update", *behind):
            scaler = ""
        elif op.kind == kind and (kind != "grads" or _is_shift(op.call)):
            others = not unscaled or (bool(op.of) and op.of not in unscaled)  # not unscaled, as far as it is known
            waiting.append((op, bool(scaler) and others))
        elif op.kind == "scaler_step":
            yield from ((each, what.format(plain(op.scaler)) if bad else "") for each, bad in waiting)
            scaler, waiting = "", []


@on_paths("HS064")
def _scaled_twice(path: Sequence[Op]) -> Verdicts:
    for op in path:
        if op.kind == "scale":
            yield op, f"`{op.target.partition('#')[0]}` is scaled by `{plain(op.of)}` already" if op.of else ""


@on_paths("HS065")
def _clipped_behind(path: Sequence[Op]) -> Verdicts:
    stepped = False
    for number, op in enumerate(path):
        if op.kind == "clip":
            later = next((o.kind for o in path[number:] if o.kind in BACKWARDS or o.kind in STEPS), "")
            late = stepped and later not in STEPS and "inf" not in ast.unparse(op.call)
            yield op, "gradients are clipped behind the step of them" if late else ""
        elif op.kind in BACKWARDS or op.kind in STEPS:
            stepped = op.kind in ("step", "scaler_step")


WHILE = "while they are multiplied by the scale of `{0}`"
CLIPPED = f"gradients are clipped {WHILE}: no `{{0}}.unscale_` since the backward pass"
on_paths("HS054")(partial(_while_scaled, kind="grads", what=f"gradients are changed {WHILE}"))
on_paths("HS055")(partial(_while_scaled, kind="grads_read", what="these are gradients times the scale of `{}`"))


@check_of("HS001")
def _clipped_scaled(script: Script) -> Iterator[Hit]:
    yield from judged(script, partial(_while_scaled, kind="clip", what=CLIPPED))
    backwards = [call for call in script.calls if method(call) == "backward"]
    scaled = [call for call in backwards if any(is_call(script, n, script.scalers, "scale") for n in walked(call))]
    if not scaled or len(scaled) < len(backwards) or re.search("unscale|get_scale", script.text):
        return
    for site in all_sites(script):  # a callback: the file unscales nowhere, and each of its losses is scaled
        name, others = getattr(site.function, "name", ""), {method(s.call) for s in sites(script, site.function)}
        used = name and script.text.count(name) > 1 and not others & {"backward", "step"}
        if used and CLIPPING.fullmatch(script.called(site.call)) and "inf" not in ast.unparse(site.call):
            yield Hit(site.call.lineno, CLIPPED.format(next(iter(script.scalers))))


def _is_shift(node: ast.AST) -> bool:
    """Return whether a change of gradients is another one at another scale, or hides an overflow from the scaler."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=args):
            hides = bool(re.search("clamp|nan_to_num", name))
            return hides or (name in ("add_", "sub_") and not any(map(_has_scale, args)))
        case ast.AugAssign(op=ast.Add() | ast.Sub(), value=value):
            return not _has_scale(value)
        case ast.Assign(value=ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right)):
            return not (_has_scale(left) and _has_scale(right))
        case ast.Assign(targets=[target], value=value):
            return bool(re.search(r"clamp|nan_to_num|\[.*is(finite|nan|inf)", f"{method(value)} {ast.unparse(target)}"))
    return False


def _has_scale(node: ast.expr) -> bool:
    """Return whether a value is a multiple of gradients: it names them other than for their shape."""
    return "grad" in re.sub(r"\w+_like\([^()]*\)", "", ast.unparse(node))


@check_of("HS034")
def _never_cleared(script: Script) -> Iterable[Hit]:
    found = PATTERNS["CLEARS"].search(script.text) or PATTERNS["OWN_LOOPS"].search(script.text)
    return () if found else judged(script, _accumulates)


def _accumulates(path: Sequence[Op]) -> Verdicts:
    stepped, backward = set[str](), False
    for op in path:
        if op.kind in ("scaled_backward", "plain_backward"):
            backward = True
        elif op.kind in ("step", "scaler_step"):
            what = f"`{plain(op.target)}` steps in every iteration, and the file never sets gradients to zero"
            yield op, what if op.target in stepped and backward else ""
            stepped.add(op.target)
            backward = False
        elif op.kind in ("escape", "managed_backward") and op.target:
            yield from ((each, "") for each in path if each.kind in ("step", "scaler_step"))
            return


@check_of("HS035")
def _cleared_if_finite(script: Script) -> Iterator[Hit]:
    for node in walked(script.tree) if script.uses_torch else ():
        inner = walked(node) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) else ()
        clears = {n for n in inner if method(n) == "zero_grad"}
        for choice in [n for n in inner if isinstance(n, ast.If) and not n.orelse and clears]:
            test, inside = script.constant(choice.test), {n for statement in choice.body for n in walked(statement)}
            called = set(map(method, inside))
            if "step" in called and "backward" not in called and clears <= inside and test and _finite(test):
                yield Hit(choice.lineno, f"gradients are cleared only under `{ast.unparse(choice.test)}`")


def _finite(test: ast.expr) -> bool:
    text = ast.unparse(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return "isfinite" not in text and bool(re.search("isnan|isinf", text))
    return "isfinite" in text and not any(isinstance(n, ast.Not) for n in walked(test))


@on_paths("HS036")
def _clip_in_micro_batch(path: Sequence[Op]) -> Verdicts:
    clipped: dict[ast.AST, bool] = {}  # a clip since the last step -> whether a backward pass followed it
    backward: Op | None = None
    stepping = any(op.kind in ("step", "scaler_step") and ends_window(op) for op in path)
    for op in path:
        if op.kind == "clip" and stepping and backward is not None and in_each(op, backward):
            if clipped.get(op.call, False):
                yield op, "gradients are clipped in every micro-batch, and the optimizer steps in some"
            clipped[op.call] = False
        elif op.kind in BACKWARDS:
            backward = op
            clipped = dict.fromkeys(clipped, True)
        elif op.kind in ("step", "scaler_step", "zero", "escape"):
            clipped = {}


@check_of("HS037")
def _waits(script: Script) -> Iterator[Hit]:
    for function in script.functions if script.uses_torch else ():
        looped = [site for site in sites(script, function) if site.place.loops]
        training = {s.place.loops[-1] for s in looped if method(s.call) == "backward"}
        every = [n.func.value for n in walked(function) if method(n) == "backward"]  # type: ignore[attr-defined]
        losses = {script.name(n.args[0] if method(n) == "scale" and n.args else n) for n in every} - {""}
        seen, waited = set(), set()
        for site in looped:
            loop, call = site.place.loops[-1], site.call
            if loop not in training or site.place.branches or site.place.no_grad:
                continue
            if script.called(call).endswith("synchronize"):
                waited.add(loop)
            name = script.owner(call) if method(call) == "item" else ""
            if script.called(call) == "float" and call.args:
                name = script.name(call.args[0])
            if name in losses and (name, loop) not in seen and loop not in waited:
                seen.add((name, loop))
                yield Hit(call.lineno, f"`{ast.unparse(call)}` waits for the device in every step")


@check_of("HS038")
def _own_step(script: Script) -> Iterator[Hit]:
    for function in script.functions:
        calls = sites(script, function)
        made = [s for s in calls if script.called(s.call) in TRAIN_STEPS and len(s.call.args) > 1]
        for step, optimizer in {script.target(s.statement): script.name(s.call.args[1]) for s in made}.items():
            steps = [(s.place.loops, s.place.branches) for s in calls if script.called(s.call) == step]
            for site in calls:
                beside = optimizer and site.place.loops and (site.place.loops, site.place.branches) in steps
                if step and beside and script.called(site.call) == f"{optimizer}.step":
                    yield Hit(site.call.lineno, f"`{step}(...)` has stepped `{optimizer}` already")
