"""Recipes: a policy compiled for the devices that a region enters.

A region is a real torch.autocast region, so third-party code, custom_fwd and checkpointing see the state they expect,
and, only where the policy differs from torch's own lists, a `RuleMode` on top. `opening` opens and closes it; code that
torch.compile traces enters it here, by operations that Dynamo can trace.

Note [composites]: a mode is off inside its own handler, so a Python function of torch.nn.functional that torch reports
to modes as one operator (multi_head_attention_forward, normalize, gumbel_softmax, ...) hides the operators it calls. If
it has no rule of its own but calls operators that have one, it is run from a copy of itself that does not report to
modes, with the mode on again, so that its parts get their rules.

Note [unruled layers]: a function mode costs about 1 us for each operator and attribute it lets through, and 5 us for a
function of torch.nn.functional. A layer of torch.nn whose forward calls nothing that the mode has a handler for runs
with the mode off. What it calls is read from its code and from that of the functions and methods it calls.
"""

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.cast.arithmetic.emulate import EMULATED, RECURRENT, WIDENED
from halfstep.cast.arithmetic.norms import NORMS
from halfstep.cast.losses.linear_loss import linear_cross_entropy
from halfstep.cast.rules import handlers
from halfstep.cast.rules.dispatch import Handler, Lowering, RuleMode, as_called
from halfstep.cast.state import STATE
from halfstep.errors import RegionError, warn
from halfstep.formats import DTYPES, Format, format_of
from halfstep.policy.operators import LINEAR_LOSS, callables, custom_overrides, operator_name, table
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import Decision, operator_rules, resolved, surprise
from halfstep.policy.rule_kinds import NO_RULE, RULE_KINDS, RuleKind
from halfstep.torch_private.compiler import FrameAction, FrameExecStrategy, set_code_exec_strategy
from halfstep.torch_private.modules import ConvBase
from halfstep.torch_private.operators import nn_functions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recipe:
    """A policy compiled for the devices a region enters. Compared by identity: equal policies share one recipe."""

    policy: Policy
    devices: tuple[tuple[str, torch.dtype | None, bool], ...]  # type, dtype (None: as outside), autocast enabled
    mode: RuleMode | None  # the rules on top of torch.autocast; None where torch's own lists are the policy
    cache: bool | None = None  # whether weight casts may be cached, by torch.autocast and here; None: as outside


@functools.lru_cache(maxsize=256)  # a search over policies may try thousands
def recipe_for(
    policy: Policy, device_types: tuple[str, ...], *, enabled: bool = True, cache: bool | None = None
) -> Recipe:
    """Compile `policy` for `device_types`; `enabled=False` makes a region in which nothing is cast."""
    devices, lowered, emulating = [], [], set()
    simulated: Format | None = None
    for device in device_types:
        concrete = resolved(policy, device)
        on = enabled and concrete.dtype != "fp32"
        dtype = DTYPES.get(concrete.dtype, torch.float32)  # fp32 carries the values of a simulated format
        if concrete.dtype not in DTYPES:
            simulated = format_of(concrete.dtype)
        if enabled and device == device_types[0] and (note := surprise(policy, device)):
            warn(f"policy {policy.name!r} on {device}: {note}")
        # torch.autocast sets the format it was given, also where it is off; without a low one that state stays
        devices.append((device, dtype if on or dtype is not torch.float32 else None, on))
        if on:
            lowered.append(device)
            if concrete.dtype == "fp16" and concrete.emulate == "always":
                emulating.add(device)
    how = Lowering(emulating=frozenset(emulating), simulated=simulated)
    rules = compile_rules(policy, tuple(lowered), how) if lowered else {}
    custom = custom_overrides(policy.ops) if lowered else ()
    by_hand = precise_rules(policy, tuple(lowered), rules) if lowered else {}
    mode = RuleMode(tuple(lowered), rules, how, custom, by_hand) if rules or custom or by_hand else None
    return Recipe(policy=policy, devices=tuple(devices), mode=mode, cache=cache)


def call_traced(recipe: Recipe, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` in the region of `recipe` by what `torch.compile` can trace: torch.autocast objects in `with`."""
    if recipe.mode is not None and recipe.mode.how.simulated is not None:
        raise RegionError(f"format {recipe.policy.dtype!r} is simulated, which torch.compile cannot trace; run eagerly")
    outer = STATE.mode
    STATE.mode = recipe.mode
    try:
        return _call_in(recipe, len(recipe.devices), func, args, kwargs)
    finally:
        STATE.mode = outer


def _call_in(recipe: Recipe, depth: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if depth:
        device, dtype, on = recipe.devices[depth - 1]
        with torch.autocast(device, dtype=dtype, enabled=on):
            return _call_in(recipe, depth - 1, func, args, kwargs)
    if recipe.mode is None:
        return func(*args, **kwargs)
    with recipe.mode:
        return func(*args, **kwargs)


def run_eagerly(function: Callable[..., Any], *, below: bool = True) -> None:
    """Keep Dynamo from tracing `function` and, if `below`, what it calls; Dynamo (a second) is not imported for it.

    Where it breaks a graph at ``with region:`` it would trace `autocast.__enter__` by itself, and the calls that set
    autocast's state would run once, at trace time, and never again.
    """
    if set_code_exec_strategy is not None:  # an older torch: `with` in a compiled function may misbehave
        skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if below else FrameAction.DEFAULT)
        set_code_exec_strategy(function.__code__, skip)


run_eagerly(RuleMode.__torch_function__)  # a frame by itself where a layer runs eagerly between two graphs: an RNN


# ------------------------------------------------------------------ the table callable -> handler


def _native(name: str, kind: RuleKind, devices: tuple[str, ...]) -> bool:
    """Return whether torch.autocast does the same with this operator on every one of `devices`."""
    rows = [table("torch", device).get(name) for device in devices]
    return kind.format != "input" and all(row is not None and RULE_KINDS[row.rule] is kind for row in rows)


def _decisions(policy: Policy, devices: tuple[str, ...]) -> dict[str, Decision]:
    decisions: dict[str, Decision] = {}
    for device in reversed(devices):
        decisions.update(operator_rules(policy, device))
    return decisions


def precise_rules(
    policy: Policy, devices: tuple[str, ...], rules: Mapping[Callable[..., Any], Handler]
) -> Mapping[Callable[..., Any], Handler]:
    """Return callable -> handler, of the low operators, where modules of the policy are to compute in fp32."""
    if not any(rule == "fp32" for _, rule in policy.modules):
        return {}
    low = [name for name, decision in _decisions(policy, devices).items() if RULE_KINDS[decision.rule].format == "low"]
    spelled = {func for name in low for func in callables(name)}
    if "linear" in low:
        spelled |= {linear_cross_entropy, torch.einsum, torch.tensordot, *callables(LINEAR_LOSS)}
    return {func: handlers.of_low(rules.get(func, as_called)) for func in spelled}


def compile_rules(policy: Policy, devices: tuple[str, ...], how: Lowering) -> Mapping[Callable[..., Any], Handler]:
    """Return callable -> handler, of the operators that torch.autocast would treat differently on any of `devices`."""
    decisions = _decisions(policy, devices)
    rules: dict[str, RuleKind] = {}
    for name, decision in decisions.items():
        kind = RULE_KINDS[decision.rule]
        if kind.format == "low" and (how.simulated or (how.emulating and (name in EMULATED or name in WIDENED))):
            rules[name] = kind
        elif policy.table == "torch" and decision.origin == "table":
            continue  # the torch.autocast region underneath has that table
        elif not _native(name, kind, devices) or (name == "cross_entropy" and kind.format == "fp32"):
            rules[name] = kind
    if policy.table != "torch":
        listed = {name for device in devices for name in table("torch", device)}
        rules.update(dict.fromkeys(listed - decisions.keys(), NO_RULE))
    if how.emulating and policy.table == "torch":
        # torch lowers them on CUDA; on the CPU their insides would run in fp16 kernels that are slow or do not exist
        rules.update(dict.fromkeys(RECURRENT - decisions.keys(), RULE_KINDS["low"]))
    compiled: dict[Callable[..., Any], Handler] = {}
    if rules:
        names = ("__setitem__", *handlers.IN_PLACE)
        spellings = (getattr(space, name, None) for name in names for space in (Tensor, torch))
        compiled.update({spelled: handlers.into_destination for spelled in spellings if spelled is not None})
    product = rules.pop(LINEAR_LOSS, rules.get("linear"))
    if product is not None:
        loss = decisions.get("cross_entropy")
        wide = loss is not None and RULE_KINDS[loss.rule].format == "fp32" and how.simulated is None
        spelled = (linear_cross_entropy, *callables(LINEAR_LOSS))
        compiled.update(dict.fromkeys(spelled, handlers.of_linear_loss(product, how, fused=wide)))
    for name, kind in rules.items():
        native = _native(name, kind, devices)
        for func in callables(name):
            compiled[func] = handlers.of_rule(name, kind, func, how, native=native)
    if policy.params == "low":
        for func in (F.batch_norm, F.instance_norm):
            compiled.setdefault(func, handlers.of_stateful(NO_RULE.cast_to))  # parameters in the statistics' format
    if "cpu" in devices and policy.dtype == "fp16" and policy.emulate != "never":
        compiled.update({func: handlers.of_norm(compiled.get(func), func) for func in NORMS})
    for composite in composites(frozenset(rules)):
        if composite not in compiled and operator_name(composite) not in decisions:
            compiled[composite] = handlers.of_composite(unreported(composite))
    if compiled:
        compiled[Tensor.data.__get__] = handlers.data_read  # type: ignore[attr-defined]  # a descriptor of C
    if "cross_entropy" not in decisions and rules.keys() & {"log_softmax", "nll_loss"}:
        compiled[F.cross_entropy] = handlers.of_composite(cross_entropy_in_parts)
    return compiled


# ------------------------------------------------------------------ note [composites]


def composites(ruled: frozenset[str]) -> list[types.FunctionType]:
    """Return the Python functions of torch.nn.functional that report to modes and call a ruled operator."""
    found = []
    for name, func in vars(F).items():
        if not isinstance(func, types.FunctionType) or "handle_torch_function" not in func.__code__.co_names:
            continue
        if any(called != name and (_name_of_called(called) in ruled) for called in _names(func)):
            found.append(func)
    return found


def _name_of_called(name: str) -> str | None:
    """Return the operator that a bare name inside torch.nn.functional refers to, or None."""
    for space in (F, torch, Tensor):
        if space is torch and name not in vars(torch):  # torch.__getattr__ would import Dynamo
            continue
        func = getattr(space, name, None)
        if callable(func):
            try:
                return operator_name(func)
            except TypeError:  # unhashable
                return None
    return None


@functools.cache
def unreported(func: types.FunctionType) -> types.FunctionType:
    """Return a copy of `func` that does not report itself to torch-function modes; what it calls still does."""
    names = [n for n in func.__globals__ if n.startswith("has_torch_function")]
    quiet = {**func.__globals__, **dict.fromkeys(names, lambda *tensors: False)}
    copy = types.FunctionType(func.__code__, quiet, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def cross_entropy_in_parts(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy from log_softmax and nll_loss, for policies with rules for these and none for the whole."""
    if size_average is not None or reduce is not None or label_smoothing or target.is_floating_point():
        return unreported(F.cross_entropy)(  # type: ignore[no-any-return]
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    log_probabilities = F.log_softmax(input, 1 if input.dim() > 1 else 0)
    return F.nll_loss(log_probabilities, target, weight, ignore_index=ignore_index, reduction=reduction)


# ------------------------------------------------------------------ note [unruled layers]

LAYERS = frozenset(
    getattr(nn, name)
    for name in """AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d CELU Conv1d Conv2d Conv3d
    ConvTranspose1d ConvTranspose2d ConvTranspose3d Dropout Dropout1d Dropout2d Dropout3d ELU Flatten GELU GroupNorm
    Hardsigmoid Hardswish Hardtanh Identity LayerNorm LeakyReLU Linear LogSigmoid LogSoftmax MaxPool1d MaxPool2d
    MaxPool3d Mish PReLU RMSNorm ReLU ReLU6 SELU SiLU Sigmoid Softmax Softplus Tanh Unflatten""".split()
)
"""Classes whose forward, and what it calls, does arithmetic on tensors by name only: no ``+`` hides in them."""

SPACES = (F, torch, Tensor, nn_functions)


def unruled(module: nn.Module, original: type[nn.Module], ruled: Mapping[Callable[..., Any], Any]) -> bool:
    """Return whether the forward of `module`, a layer of torch.nn of class `original`, calls nothing in `ruled`."""
    if original not in LAYERS or module._modules:  # children, parametrizations too, have rules of their own
        return False
    names = _names(original.forward, original)  # type: ignore[arg-type]  # classes hash
    if isinstance(module, ConvBase) and module.padding_mode == "zeros":
        names -= {"pad"}  # what the other modes call
    return not any(getattr(space, name) in ruled for name in names for space in SPACES if hasattr(space, name))


@functools.cache
def _names(function: Callable[..., Any], kind: type[nn.Module] | None = None) -> frozenset[str]:
    """Return every name that `function` uses, and those of what it calls: of private helpers only if not in `kind`."""
    names, seen, todo = set[str](), set[types.FunctionType](), list[Any]([function])
    while todo:
        current = todo.pop()
        if isinstance(current, types.FunctionType) and current not in seen:
            seen.add(current)
            if current.__module__ == "torch.overrides":  # how functions test for a mode
                continue
            code = current.__code__
            names.update((current.__name__, *code.co_names))
            for name in code.co_names:
                if kind is not None:
                    todo += (current.__globals__.get(name), getattr(kind, name, None), getattr(F, name, None))
                elif name.startswith("_"):
                    todo.append(current.__globals__.get(name))
            if kind is not None:  # pooling chooses between two functions it holds
                todo += [cell.cell_contents for cell in current.__closure__ or ()]
    return frozenset(names)
