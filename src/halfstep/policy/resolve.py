"""Resolve: policy x device -> concrete formats and operator rules; policy x model -> Plan. Every decision has a reason.

Order of operator rules, strongest last: table, the fields `residual` and `loss`, `ops` in order. Order of module rules:
each pattern speaks of the modules it matches and of all below them; the last pattern that speaks of a module wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halfstep.errors import PolicyError, UnbuiltError
from halfstep.formats import format_of
from halfstep.policy.custom import custom_rule, decisions, is_custom
from halfstep.policy.match import NORMS, matches, rules_of_modules
from halfstep.policy.operators import LINEAR_LOSS, operator_names
from halfstep.policy.optable import losses, table
from halfstep.policy.plan import Decision, ModuleDecision, ParameterDecision, Plan
from halfstep.policy.policy import DTYPES, Policy
from halfstep.policy.scale_rule import SCALE_RULES
from halfstep.policy.units import default_device_types, units

__all__ = [
    "Decision",
    "Plan",
    "operator_rules",
    "reduces_itself",
    "require_engine",
    "resolve",
    "resolve_dtype",
    "resolved",
]

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What rules apply to; parameters of any other dtype (fp64, complex, integer) are never touched."""

RESIDUAL_RULES: Mapping[str, tuple[str, str]] = {
    "embedding": ("low", "residual='low': the stream starts low; rows are gathered, then cast"),
    "embedding_bag": ("low", "residual='low': the stream starts low; rows are gathered and summed, then cast"),
    "add": ("keep", "residual='low': adding to the stream keeps the stream's format"),
}
"""What ``residual="low"`` means for operators."""

MASTERS = "split in a TrainStep that updates in one pass (AdamW, Adam, SGD, hs.Lion), master in a loop of one's own"
"""What ``master="auto"`` stands for where that depends on who steps the optimizer."""


def resolve_dtype(policy: Policy, device_type: str) -> tuple[str, str]:
    """Return the low format of `policy` on a device, and a note: why, or what happens instead of missing units.

    Returns:
        ("bf16" | "fp16" | "fp32" | a simulated format, note); "fp32" means nothing is lowered. The note is "" if there
        is nothing to say.

    Raises:
        PolicyError: torch.autocast does not exist for this device type.
    """
    there = units(device_type)
    if policy.dtype not in DTYPES:
        words = f"{policy.dtype} is simulated: operators take and give its numbers, in fp32 tensors and arithmetic"
        return policy.dtype, words
    if policy.dtype == "auto":
        if there.bf16:
            return "bf16", f"dtype auto: {there.reason}"
        if there.fp16 and device_type != "cpu":
            return "fp16", f"dtype auto: {there.reason}"
        remedy = "dtype='bf16' or 'fp16' (emulated) by name works here too"
        return "fp32", f"dtype auto: {there.reason}, so everything stays fp32; {remedy}"
    if policy.dtype == "bf16" and not there.bf16:
        return "bf16", f"{there.reason}: bf16 runs in torch's kernels without units, slower than fp32"
    if policy.dtype == "fp16" and policy.emulate == "always":
        return "fp16", "emulate='always': products take fp16, compute in fp32 and round once"
    if policy.dtype == "fp16" and not there.fp16:
        if policy.emulate == "never":
            return "fp16", f"{there.reason}: emulate='never' runs torch's fp16 kernels, many times slower than fp32"
        return "fp16", f"{there.reason}: fp16 is emulated (fp16 in, fp32 compute, one rounding)"
    return policy.dtype, ""


def resolved(policy: Policy, device_type: str, *, one_pass: bool = False) -> Policy:
    """Return `policy` as it is carried out on a device: no "auto" and no name of a scale rule is left.

    Where the low format is fp32 nothing is lowered: parameters, residual stream and inputs become fp32 too.

    Args:
        policy: what is wanted.
        device_type: "cpu", "cuda", ...
        one_pass: whether the optimizer is stepped by halfstep's own operators. They read and write both halves of split
            weights as fast as masters, and these take 2 bytes less: then ``master="auto"`` is split in bf16.

    Raises:
        PolicyError: torch.autocast does not exist for this device type.
    """
    dtype, _ = resolve_dtype(policy, device_type)
    if dtype == "fp32":
        policy = policy.replace(params="fp32", norms="fp32", residual="fp32", inputs="keep")
    master = policy.master
    if policy.params == "fp32":
        master = "none"
    elif master == "auto":
        master = "split" if one_pass and dtype == "bf16" else "master"
    scale = policy.scale
    if scale == "auto":  # what has fewer exponents than fp32 needs its gradients moved to where it has numbers
        scale = SCALE_RULES["halfstep"] if format_of(dtype).is_narrow else "none"
    elif isinstance(scale, str) and scale != "none":
        scale = SCALE_RULES[scale]
    emulate = policy.emulate
    if emulate == "auto":
        lacking = dtype not in DTYPES or (dtype == "fp16" and not units(device_type).fp16)
        emulate = "always" if lacking else "never"
    return policy.replace(dtype=dtype, master=master, scale=scale, emulate=emulate)


def require_engine(policy: Policy) -> None:
    """Refuse a policy that this version of halfstep cannot carry out.

    Raises:
        UnbuiltError: the message says what is missing and what comes nearest.
        PolicyError: a field asks for something that another field rules out.
    """
    _require_low_parameters(policy)
    in_fp8 = [pattern for pattern, rule in policy.ops if rule == "fp8"]
    if in_fp8:
        raise UnbuiltError(
            f"policy {policy.name!r} cannot run yet: missing are products in fp8 (scaling of tensors, casts), which "
            f"ops asks for: {in_fp8[0]!r} = 'fp8'; the nearest that runs is 'O2'"
        )
    if policy.params == "low" and policy.dtype not in DTYPES:
        raise UnbuiltError(
            f"policy {policy.name!r}: parameters cannot be held in {policy.dtype!r}, which no dtype stores; use "
            "params='fp32': operators see them rounded to it"
        )
    elif policy.params == "fp32" and policy.master not in {"auto", "none"}:
        raise PolicyError(
            f"policy {policy.name!r}: master={policy.master!r} is what stands behind low parameters, and "
            "params='fp32'; set params='low', or leave master out"
        )
    elif policy.params == "low" and policy.master == "split" and policy.dtype == "fp16":
        raise PolicyError(
            f"policy {policy.name!r}: master='split' keeps the lower halves of fp32 numbers whose upper halves are "
            "bf16, and dtype='fp16'; use master='master' or 'kahan', or dtype='bf16'"
        )
    elif policy.reduce == "low" and policy.dtype not in DTYPES:
        raise UnbuiltError(
            f"policy {policy.name!r}: reduce='low' would send {policy.dtype!r}, which no dtype stores; use "
            "reduce='grad'"
        )


def _require_low_parameters(policy: Policy) -> None:
    """Refuse a field that speaks of low parameters, or of the fp32 values behind them, where there are none.

    Raises:
        PolicyError: which one, and what to change.
    """
    if policy.params == "fp32" and policy.norms == "low":
        raise PolicyError(
            f"policy {policy.name!r}: norms='low' is the format of norms beside low parameters, and params='fp32'; set "
            "params='low', or leave norms out"
        )
    if policy.params == "fp32" or policy.master != "none":
        return
    if policy.grads == "fp32":
        raise PolicyError(
            f"policy {policy.name!r}: grads='fp32' under master='none', where optimizers step low weights by gradients "
            "of their format; use master='stochastic', which keeps nothing either, or leave grads out"
        )
    if policy.state == "low":
        raise PolicyError(
            f"policy {policy.name!r}: state='low' rounds the fp32 states of an optimizer that steps fp32 values, and "
            "under master='none' it steps low weights, whose states are low already; choose another master, or leave "
            "state out"
        )


def reduces_itself(concrete: Policy) -> bool:
    """Return whether a policy (resolved) asks for averages over processes that DistributedDataParallel does not make.

    It averages each gradient in the format of its parameter.
    """
    low = concrete.params == "low"
    if concrete.reduce == "low":
        return concrete.dtype != "fp32"
    kept = any(rule == "keep" for _, rule in concrete.modules)  # what was loaded low stays low there
    return (low and concrete.grads == "fp32") or (concrete.reduce == "fp32" and (low or kept))


def operator_rules(policy: Policy, device_type: str) -> dict[str, Decision]:
    """Return the decision for every operator of torch that has a rule; the others run in their inputs' format.

    The device matters only for ``table="torch"``, whose rows are torch.autocast's lists as data.
    """
    return dict(_operator_rules(policy, "cpu" if device_type == "cpu" else "cuda"))


@lru_cache(maxsize=256)
def _operator_rules(policy: Policy, device_type: str) -> Mapping[str, Decision]:
    rules = {
        op: Decision(row.rule, "table", f"{row.reason} ({row.source})")
        for op, row in table(policy.table, device_type).items()
    }
    if policy.residual == "low":
        for op, (rule, reason) in RESIDUAL_RULES.items():
            rules[op] = Decision(rule, "residual", reason)
    if policy.loss == "fp32":
        for op in losses():
            if op not in rules or rules[op].rule in {"low", "keep", "widest"}:
                rules[op] = Decision("fp32", "loss", "loss='fp32': loss functions run in fp32 whatever the table says")
    for pattern, rule in policy.ops:
        for op in () if is_custom(pattern) else operator_names(pattern):
            rules[op] = Decision(rule, "ops", f"ops: {pattern!r} = {rule!r}")
    product = rules.get("linear")
    if LINEAR_LOSS not in rules and product and (policy.table, product.origin) != ("torch", "table"):
        rules[LINEAR_LOSS] = Decision(product.rule, product.origin, "its product as linear, its loss as cross_entropy")
    return rules


def resolve(policy: Policy, model: nn.Module, device_type: str | None = None) -> Plan:
    """Return what `policy` means for `model`: every module's rule, every parameter's format, every operator's rule.

    Args:
        policy: what is wanted.
        model: read only.
        device_type: "cpu", "cuda", ...; by default that of the model's parameters.

    Raises:
        PolicyError: a module pattern matches nothing, or torch.autocast does not exist for the device type.
    """
    device = _device_type(model) if device_type is None else device_type
    _, note = resolve_dtype(policy, device)
    concrete = resolved(policy, device)
    rules = rules_of_modules(policy.modules, model)
    parameters, untouched = _parameters(concrete, model, rules)
    notes = [note, *untouched]
    if concrete.params == "low" and any(b.is_floating_point() for b in model.buffers()):
        notes.append("floating buffers are never converted")
    if concrete.params == "low" and concrete.outputs == "keep" and concrete.loss == "fp32":
        notes.append("outputs stay low: compute the loss inside hs.TrainStep, where it is fp32, or from output.float()")
    own = decisions(policy.ops)
    notes += [
        f"ops: no operator {pattern!r} is registered (yet); @hs.operator registers one"
        for pattern, _ in policy.ops
        if is_custom(pattern) and not any(custom_rule(((pattern, "found"),), name, "") for name in own)
    ]
    return Plan(
        policy=concrete,
        device=device,
        model=type(model).__name__,
        modules=tuple(_module(path, module, rules, concrete) for path, module in model.named_modules()),
        parameters=parameters,
        operators=tuple(sorted({**operator_rules(concrete, device), **own}.items())),
        notes=tuple(n for n in notes if n),
        masters="" if resolved(policy, device, one_pass=True).master == concrete.master else MASTERS,
    )


def _device_type(model: nn.Module) -> str:
    found = sorted({p.device.type for p in model.parameters()} - {"meta", "cpu"})
    return found[0] if found else ("cpu" if any(True for _ in model.parameters()) else default_device_types()[0])


def _module(
    path: str, module: nn.Module, rules: Mapping[nn.Module, tuple[str, str]], concrete: Policy
) -> ModuleDecision:
    kind = type(module).__name__
    if module not in rules:
        return ModuleDecision(path=path, kind=kind, rule="", format="", reason="no pattern speaks of it")
    pattern, rule = rules[module]
    reason = f"modules: {pattern!r} = {rule!r}"
    made = {"low": concrete.dtype, "fp32": "fp32", "keep": "input"}[rule]
    return ModuleDecision(path=path, kind=kind, rule=rule, format=made, reason=reason)


def _parameters(
    concrete: Policy, model: nn.Module, rules: Mapping[nn.Module, tuple[str, str]]
) -> tuple[tuple[ParameterDecision, ...], list[str]]:
    """Decide the format of every parameter; return notes on those that are never touched besides."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((f"{path}.{name}" if path else name, module))
    decisions, untouched = [], []
    for parameter, places in owners.items():
        name, *aliases = [place for place, _ in places]
        if parameter.dtype not in FORMATS:
            kind = str(parameter.dtype).removeprefix("torch.")
            untouched.append(f"parameter {name} is {kind} and is never converted")
            continue
        verdicts = [_parameter(concrete, parameter, module, rules.get(module)) for _, module in places]
        low, made, reason = min(verdicts, key=lambda verdict: verdict[0])  # a shared parameter: any fp32 owner wins
        if low is False and any(verdict[0] for verdict in verdicts):
            reason = f"shared by {len(places)} modules; {reason}"
        numel = 0 if is_lazy(parameter) else parameter.numel()
        decisions.append(
            ParameterDecision(name=name, format=made, low=low, numel=numel, reason=reason, aliases=tuple(aliases))
        )
    return tuple(decisions), untouched


def _parameter(
    concrete: Policy, parameter: nn.Parameter, owner: nn.Module, rule: tuple[str, str] | None
) -> tuple[bool, str, str]:
    """Return (lowered, format, reason) of a parameter as one of its owners wants it."""
    now = FORMATS[parameter.dtype]
    if rule is not None and rule[1] == "fp32":
        return False, "fp32", f"modules: {rule[0]!r} = 'fp32'"
    if rule is not None and rule[1] == "keep":
        return False, now, f"modules: {rule[0]!r} = 'keep'"
    if concrete.params == "fp32":
        if now == "fp32" or not parameter.requires_grad:
            return (
                False,
                now,
                "params='fp32': nothing to convert" if now == "fp32" else "frozen: stays as it was loaded",
            )
        return False, "fp32", "params='fp32': a low checkpoint; updates smaller than its rounding would be lost"
    if rule is None and concrete.norms == "fp32" and matches(NORMS, "", owner):
        return False, "fp32", "norms='fp32': it belongs to a normalisation layer"
    statistics = getattr(owner, "running_mean", None)
    if rule is None and isinstance(statistics, torch.Tensor) and statistics.dtype is torch.float32:
        return False, "fp32", "beside fp32 running statistics kernels take fp32 weights; a low one is cast at each call"
    return True, concrete.dtype, "params='low'"
