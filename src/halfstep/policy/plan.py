"""Plan: what a policy means for one model on one device, with the reason of every decision; `resolve` makes it.

Order of module rules: what a transformers model declares to be fp32, then patterns, which match modules and all below
them; the last wins.

Note [eight bits]: of the linear layers that a rule such as "fp8" covers, these stay as they are: the first and the last
of the model, those with a dimension that is no multiple of 16, and those whose products are too small to gain. A
pattern that ends in a layer's own name ("blocks.*.qkv") converts it whatever its place and size. A module that stays
follows the rules before it.
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halfstep.arguments import DEVICE_TYPE, FLAG, MODEL, NONE, a, check
from halfstep.errors import PolicyError
from halfstep.formats import DTYPE_NAMES, DTYPES, format_of
from halfstep.policy.match import NORMS, declared_fp32, matches, rules_of_modules
from halfstep.policy.operators import custom_rule, is_custom
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import (
    Decision,
    custom_decisions,
    device_types_of,
    operator_rules,
    resolve_dtype,
    resolved,
    units,
)
from halfstep.policy.rule_kinds import NO_RULE, RULE_KINDS, RULES
from halfstep.torch_private.modes import is_traceable_wrapper_subclass

ModuleRules = Mapping[nn.Module, tuple[str, str]]
"""Module -> where its rule is from, and the rule."""

Stays = Mapping[nn.Module, str]
"""Linear layers that a rule for eight bits covers and leaves, with the reason."""

MASTERS = "split in a TrainStep that updates in one pass, master in a loop of one's own"
"""What ``master="auto"`` means in bf16 while it is not known what steps the optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDecision:
    """The rule of one module; "" where its operators follow their own rules."""

    path: str  # dotted, "" for the root
    kind: str  # the name of its class
    rule: str
    format: str  # what its operators compute in: a format's name, "input" or ""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDecision:
    """The format of one parameter."""

    name: str  # dotted, the first one of a parameter that several modules share
    format: str
    low: bool  # the policy lowers it, so that its fp32 value is where `Policy.master` puts it
    numel: int
    reason: str
    aliases: tuple[str, ...] = ()  # its other dotted names


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a policy means for one model on one device.

    Attributes:
        policy: the policy with no "auto" left.
        device: the device type decided for.
        model: name of the model's class.
        modules: every module's rule, the root first.
        parameters: the format of every fp32, bf16 and fp16 parameter.
        operators: (operator, decision) for every operator with a rule, sorted by name.
        notes: warnings and explanations.
        masters: in words, what ``master="auto"`` becomes with which optimizer, where that was not known; else "".

    Examples:
        >>> plan = hs.resolve(hs.Policy.of("O2", dtype="bf16"), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
        >>> [(parameter.name, parameter.format) for parameter in plan.parameters]
        [('0.weight', 'bf16'), ('0.bias', 'bf16'), ('1.weight', 'fp32'), ('1.bias', 'fp32')]
    """

    policy: Policy
    device: str
    model: str
    modules: tuple[ModuleDecision, ...]
    parameters: tuple[ParameterDecision, ...]
    operators: tuple[tuple[str, Decision], ...]
    notes: tuple[str, ...] = ()
    masters: str = ""

    def __str__(self) -> str:
        """Return the plan as readable text."""
        return "\n".join(_lines(self))


def resolve(policy: Policy, model: nn.Module, device_type: str | None = None, *, one_pass: bool | None = None) -> Plan:
    """Return what `policy` means for `model`: every module's rule, every parameter's format, every operator's rule.

    Args:
        policy: what is wanted.
        model: read only.
        device_type: "cpu", "cuda", ...; by default that of the model's parameters.
        one_pass: whether the optimizer is stepped by halfstep's own operators, as in most TrainSteps; None: not known,
            and the plan names the masters of both cases.

    Raises:
        PolicyError: a module pattern matches nothing, a field rules out another one, or torch.autocast does not exist
            for the device type.
        UnbuiltError: halfstep cannot carry the policy out.

    Examples:
        >>> plan = hs.resolve(hs.Policy.of("mixed", dtype="fp16"), model)
        >>> dict(plan.operators)["softmax"].rule
        'keep'
    """
    check(
        "hs.resolve",
        PolicyError,
        policy=(policy, a(Policy, words="an hs.Policy, such as hs.Policy.of('mixed')")),
        model=(model, MODEL),
        device_type=(device_type, DEVICE_TYPE | NONE),
        one_pass=(one_pass, FLAG | NONE),
    )
    device = device_types_of([model])[0] if device_type is None else device_type
    _, note = resolve_dtype(policy, device)
    concrete = resolved(policy, device, one_pass=bool(one_pass))
    rules, declared, stays = _module_rules(concrete, model)
    parameters, untouched = _parameters(concrete, model, rules, declared)
    notes = [note, *untouched, *_eight_bit_notes(model, device, rules, stays)]
    if concrete.params == "low" and any(b.is_floating_point() for b in model.buffers()):
        notes.append("floating buffers are never converted")
    if concrete.params == "low" and concrete.outputs == "keep" and concrete.loss == "fp32":
        notes.append("outputs stay low: compute the loss inside hs.TrainStep, where it is fp32, or from output.float()")
    own = custom_decisions(policy.ops)
    notes += [
        f"ops: no operator {pattern!r} is registered (yet); @hs.operator registers one"
        for pattern, _ in policy.ops
        if is_custom(pattern) and not any(custom_rule(((pattern, "found"),), name, "") for name in own)
    ]
    return Plan(
        policy=concrete,
        device=device,
        model=type(model).__name__,
        modules=tuple(_modules(concrete, model, rules, stays)),
        parameters=parameters,
        operators=tuple(sorted({**operator_rules(concrete, device), **own}.items())),
        notes=tuple(n for n in notes if n),
        masters=MASTERS if one_pass is None and resolved(policy, device, one_pass=True) != concrete else "",
    )


def _module_rules(concrete: Policy, model: nn.Module) -> tuple[ModuleRules, Mapping[nn.Parameter, str], Stays]:
    """Return the rules, parameter -> reason for those that `model` declares to be fp32, and what stays.

    ``table="torch"`` over fp32 parameters is torch.autocast, which takes no notice of what a model declares.
    """
    modules: Mapping[nn.Module, str] = {}
    parameters: Mapping[nn.Parameter, str] = {}
    if concrete.dtype != "fp32" and (concrete.params == "low" or concrete.table != "torch"):
        modules, parameters = declared_fp32(model, narrow=format_of(concrete.dtype).is_narrow)
    patterns, stays = _rules_and_stays(concrete, model)
    given = {module: (f"modules: {pattern!r} = {rule!r}", rule) for module, (pattern, rule) in patterns.items()}
    return {module: (reason, "fp32") for module, reason in modules.items()} | given, parameters, stays


def _eight_bit_notes(model: nn.Module, device: str, rules: ModuleRules, stays: Stays) -> Iterator[str]:
    """Say which linear layers stay out of eight bits, and whether those that do not are emulated."""
    paths: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if module in stays:
            paths.setdefault(stays[module], []).append(path or "(root)")
    for reason, found in paths.items():
        yield f"not in eight bits, {reason}: {', '.join(found)}"
    used = next((rule for _, rule in rules.values() if RULE_KINDS[rule].recipe), "")
    if used and not units(device).fp8:
        yield f"{used} on {device}: no eight-bit units, so torchao emulates them: right numbers, slower than bf16"


def _modules(concrete: Policy, model: nn.Module, rules: ModuleRules, stays: Stays) -> Iterator[ModuleDecision]:
    for path, module in model.named_modules():
        reason, rule = rules.get(module, (stays.get(module, "no pattern matches it"), ""))
        of, made = RULE_KINDS.get(rule, NO_RULE), ""
        if of.recipe:
            made = "fp8_e4m3"
        elif rule and of.of_operators:
            made = concrete.dtype if of.format == "low" else of.format
        yield ModuleDecision(path=path, kind=type(module).__name__, rule=rule, format=made, reason=reason)


def _parameters(
    concrete: Policy, model: nn.Module, rules: ModuleRules, declared: Mapping[nn.Parameter, str]
) -> tuple[tuple[ParameterDecision, ...], list[str]]:
    """Decide the format of every parameter; return notes on those that are never touched besides."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((f"{path}.{name}" if path else name, module))
    decisions, untouched = [], []
    for parameter, places in owners.items():
        name, *aliases = [place for place, _ in places]
        if parameter.dtype not in DTYPE_NAMES:
            kind = str(parameter.dtype).removeprefix("torch.")
            untouched.append(f"parameter {name} is {kind} and is never converted")
            continue
        if storage := _own_storage(parameter):
            kind = f"a {storage}, which stores its values its own way,"
            untouched.append(f"parameter {name} is {kind} and is never converted")
            continue
        own = declared.get(parameter, "")
        verdicts = [_parameter(concrete, parameter, module, rules.get(module), own) for _, module in places]
        low, made, reason = min(verdicts, key=lambda verdict: verdict[0])  # a shared parameter: any fp32 owner wins
        if low is False and any(verdict[0] for verdict in verdicts):
            reason = f"shared by {len(places)} modules; {reason}"
        numel = 0 if is_lazy(parameter) else parameter.numel()
        decisions.append(
            ParameterDecision(name=name, format=made, low=low, numel=numel, reason=reason, aliases=tuple(aliases))
        )
    return tuple(decisions), untouched


def _parameter(
    concrete: Policy, parameter: nn.Parameter, owner: nn.Module, rule: tuple[str, str] | None, declared: str
) -> tuple[bool, str, str]:
    """Return (lowered, format, reason) of a parameter as one of its owners needs it; `declared`: why it is fp32."""
    now = DTYPE_NAMES[parameter.dtype]
    if rule is not None and (wanted := RULE_KINDS[rule[1]].params) != "low":
        return False, now if wanted == "input" else wanted, rule[0]
    if concrete.params == "fp32":
        if now == "fp32":
            return False, now, "params='fp32': nothing to convert"
        if not parameter.requires_grad:
            return False, now, "frozen: stays as it was loaded"
        return False, "fp32", "params='fp32': a low checkpoint; updates smaller than its rounding would be lost"
    if rule is None and declared:
        return False, "fp32", declared
    if rule is None and concrete.norms == "fp32" and matches(NORMS, "", owner):
        return False, "fp32", "norms='fp32': it belongs to a normalisation layer"
    statistics = getattr(owner, "running_mean", None)
    if rule is None and isinstance(statistics, torch.Tensor) and statistics.dtype is torch.float32:
        return False, "fp32", "beside fp32 running statistics kernels take fp32 weights; a low one is cast at each call"
    if not parameter.requires_grad and concrete.master != "none":
        return True, concrete.dtype, "params='low'; frozen: nothing is kept behind it unless an optimizer has it"
    return True, concrete.dtype, "params='low'"


# ------------------------------------------------------------------ eight bits

MULTIPLE = 16
"""What the units demand of both dimensions of a weight."""


def is_small(recipe: str, inputs: int, outputs: int) -> bool:
    """Return whether torchao's filter for `recipe` leaves out a layer of this size: the casts would cost more.

    `_auto_filter_for_recipe` in torchao/float8/float8_linear_utils.py, from times on an H100; it has none for
    "rowwise_with_gw_hp", which is given that of "rowwise".
    """
    if recipe == "tensorwise":
        return inputs <= 4096 and outputs <= 1024
    return outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)


def _rules_and_stays(policy: Policy, model: nn.Module) -> tuple[ModuleRules, Stays]:
    """Return module -> (pattern, rule) by the module rules of `policy`, and the linear layers that stay, with reasons.

    Raises:
        PolicyError: a pattern matches nothing.
    """
    given = rules_of_modules(policy.modules, model)
    if not any(RULE_KINDS[rule].recipe for _, rule in given.values()):
        return given, {}
    others = rules_of_modules(tuple(pair for pair in policy.modules if not RULE_KINDS[pair[1]].recipe), model)
    paths = {module: path for path, module in model.named_modules()}
    linear = [module for module in paths if isinstance(module, nn.Linear)]
    rules: dict[nn.Module, tuple[str, str]] = {}
    stays: dict[nn.Module, str] = {}
    for module, (pattern, rule) in given.items():
        reason = "it is no linear layer"
        if (recipe := RULE_KINDS[rule].recipe) and isinstance(module, nn.Linear):
            reason = _cannot(policy, module)
            if not reason and pattern.rpartition(".")[2] != paths[module].rpartition(".")[2]:
                reason = _should_not(recipe, module, linear)
            if reason:
                stays[module] = f"{rule}: {reason}"
        if not recipe or not reason:
            rules[module] = pattern, rule
        elif module in others:
            rules[module] = others[module]
    return rules, stays


def _cannot(policy: Policy, layer: nn.Linear) -> str:
    """Return why `layer` cannot be computed in eight bits, "" if it can."""
    kind = type(layer)
    if policy.dtype not in DTYPES or policy.dtype == "fp32":
        return f"dtype {policy.dtype!r} is neither 'bf16' nor 'fp16'"
    if kind.forward is not nn.Linear.forward or issubclass(kind, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"{kind.__name__} is not computed by the forward of torch.nn.Linear"
    if storage := _own_storage(layer.weight):
        return f"its weight is a {storage}"
    wrong = [size for size in (layer.in_features, layer.out_features) if size % MULTIPLE]
    return f"{' and '.join(map(str, wrong))} no multiple of {MULTIPLE}" if wrong else ""


def _should_not(recipe: str, layer: nn.Linear, linear: list[nn.Linear]) -> str:
    """Return why `layer`, of all `linear` ones of its model, better stays in the low format; "" if it does not."""
    if layer in (linear[0], linear[-1]):
        return f"the {'first' if layer is linear[0] else 'last'} linear layer of the model"
    if is_small(recipe, layer.in_features, layer.out_features):
        return f"{layer.in_features} x {layer.out_features} is too small to gain"
    return ""


def _own_storage(parameter: torch.Tensor) -> str:
    """Return the class of a parameter's values if they are stored in a way of its own; "" for others, and a DTensor."""
    values: Any = parameter.data
    return type(values).__name__ if is_traceable_wrapper_subclass(values) and not hasattr(values, "placements") else ""


# ------------------------------------------------------------------ text


def _lines(plan: Plan) -> Iterator[str]:
    policy = plan.policy
    yield f"plan: {plan.model} on {plan.device} under policy {policy.name or repr(policy)!r}"
    master = f"auto: {plan.masters}" if plan.masters else policy.master
    yield from _wrapped(f"low format {policy.dtype}, scale {_scale_words(policy)}, master {master}")
    yield from (line for note in plan.notes for line in _wrapped(f"note: {note}"))
    yield from _parameter_lines(plan)
    ruled = [m for m in plan.modules if m.rule]
    yield f"modules: {len(ruled)} of {len(plan.modules)} have a rule"
    for module in ruled:
        yield f"  {module.path or '(root)'} ({module.kind}): {module.rule} because {module.reason}"
    yield f"operators: {len(plan.operators)} have a rule, the others run in their inputs' format"
    for rule in RULES:
        names = [name for name, decision in plan.operators if decision.rule == rule]
        if names:
            yield from _wrapped(f"{rule}: {', '.join(names)}")


def _parameter_lines(plan: Plan) -> Iterator[str]:
    total = sum(p.numel for p in plan.parameters)
    yield f"parameters: {total:,} in {len(plan.parameters)} tensors"
    groups: dict[tuple[str, str], list[ParameterDecision]] = {}
    for parameter in plan.parameters:
        groups.setdefault((parameter.format, parameter.reason), []).append(parameter)
    for (name, reason), members in groups.items():
        count = sum(p.numel for p in members)
        few = ", ".join(p.name for p in members[:3]) + (", ..." if len(members) > 3 else "")
        yield from _wrapped(f"{name}: {count:,} ({few}): {reason}")


def _scale_words(policy: Policy) -> str:
    if isinstance(policy.scale, (str, float)):
        return str(policy.scale)
    return f"dynamic from {policy.scale.init:g} in [{policy.scale.floor:g}, {policy.scale.ceiling:g}]"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
