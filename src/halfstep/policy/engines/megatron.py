"""Megatron-LM: the mixed-precision arguments of its command line.

Its models are its own: parameters are low, fp32 main parameters stand behind them, and its modules decide what they
compute in fp32. Keys are the names of its parsed arguments, as its YAML files use them.

Source: https://github.com/NVIDIA/Megatron-LM (megatron/training/arguments.py, megatron/core/optimizer,
megatron/core/transformer/module.py), read at commit d98e8a64 (core 0.20.0).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from halfstep.policy.engines.engine import DEVICE, Engine, Expressed, in_words, rule_differences, wide_operators
from halfstep.policy.resolve import operator_rules
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

__all__ = ["MEGATRON"]

SETTABLE = ("init", "interval", "hysteresis", "floor")
"""Fields of a `ScaleRule` that are arguments."""

TINY = 2.0**-126
"""The smallest normal fp32 number, in place of a floor of 0, which Megatron refuses."""

AWARE = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
"""The optimizer with low states, which needs TransformerEngine and runs Adam only."""

MASTERS = {
    "kahan": "fp32 main parameters: more precise, 2 bytes a parameter more",
    "stochastic": "fp32 main parameters: more precise, 4 bytes a parameter more",
    "none": "fp32 main parameters: more precise, 4 bytes a parameter more",
}


def _express(policy: Policy) -> Iterator[Expressed]:
    low, lowered = policy.params == "low", policy.dtype != "fp32"
    yield Expressed(field="name")
    yield Expressed(field="dtype", settings={policy.dtype: True} if lowered else {})
    weights = f"parameters are {policy.dtype}, before fp32 main parameters; set params='low'"
    start = (
        f"main parameters start from the lowered weights: what an fp32 checkpoint has beyond {policy.dtype} is not read"
    )
    yield Expressed(field="params", lost=weights if lowered and not low else "", note=start if low else "")
    norms = f"the parameters of norms are {policy.dtype} too, before fp32 main parameters; set norms='low'"
    yield Expressed(field="norms", lost=norms if low and policy.norms == "fp32" else "")
    yield _masters(policy) if low else Expressed(field="master")
    yield from _gradients(policy, low=low) if lowered else (Expressed(field=name) for name in ("grads", "reduce"))
    yield from _operators(policy) if lowered else (Expressed(field=name) for name in ("table", "ops", "modules"))
    stream = {"fp32_residual_connection": True} if lowered and policy.residual == "fp32" else {}
    yield Expressed(field="residual", settings=stream)
    inputs = f"floating inputs are cast to {policy.dtype}; tokens are not floating"
    yield Expressed(field="inputs", note=inputs if lowered and policy.inputs == "keep" else "")
    outputs = "the last stage's outputs are cast to fp32: more precise"
    yield Expressed(field="outputs", note=outputs if lowered and policy.outputs == "keep" else "")
    yield _loss(policy)
    yield _state(policy)
    yield _scale(policy)
    always = policy.emulate == "always" and policy.dtype == "fp16"
    yield Expressed(field="emulate", lost="fp16 runs in the device's kernels; set emulate='auto'" if always else "")


def _masters(policy: Policy) -> Expressed:
    if policy.master == "split":
        return Expressed(field="master", settings=AWARE, note="with TransformerEngine 2.1 and Adam")
    return Expressed(field="master", note=MASTERS.get(policy.master, ""))


def _gradients(policy: Policy, *, low: bool) -> Iterator[Expressed]:
    """One buffer accumulates gradients and is reduced, in one format."""
    wide = policy.grads == "fp32" or not low
    wire = {"grad": "fp32" if wide else "low", "fp32": "fp32", "low": "low"}[policy.reduce]
    buffer = wide or wire == "fp32"
    if buffer:
        settings = {"accumulate_allreduce_grads_in_fp32": True}
    else:  # in bf16 Megatron accumulates in fp32 unless it is told otherwise
        settings = {"grad_reduce_in_bf16": True} if policy.dtype == "bf16" else {}
    accumulated = "gradients accumulate in fp32, as they are reduced: more precise"
    yield Expressed(field="grads", settings=settings, note=accumulated if buffer and not wide else "")
    reduced = "reduced in fp32, as they accumulate: more precise, at twice the bytes"
    yield Expressed(field="reduce", note=reduced if buffer and wire == "low" else "")


def _operators(policy: Policy) -> Iterator[Expressed]:
    settings = {"attention_softmax_in_fp32": True} if _is_wide(policy, "softmax") else {}
    own = "Megatron's modules decide what they compute in fp32"
    yield Expressed(
        field="table",
        settings=settings,
        lost=f"{own}: attention's softmax can be set, the others of {in_words(wide_operators(policy))} cannot"
        if policy.table not in {"none", "all-low"}
        else "",
        note=own if policy.table == "all-low" else "",
    )
    yield Expressed(field="ops", lost=f"{own}; leave ops out" if policy.ops else "")
    yield Expressed(field="modules", lost=f"{own}; leave modules out" if policy.modules else "")


def _is_wide(policy: Policy, operator: str) -> bool:
    """Return whether the policy computes an operator in fp32."""
    ruled = type(policy)(
        table=policy.table, ops=policy.ops, loss=policy.loss
    )  # what decides; rules are cached by policy
    decision = operator_rules(ruled, DEVICE).get(operator)
    return decision is not None and decision.rule == "fp32"


def _loss(policy: Policy) -> Expressed:
    if policy.dtype == "fp32" or _is_wide(policy, "cross_entropy"):
        return Expressed(field="loss")
    if policy.dtype == "fp16":
        return Expressed(field="loss", settings={"fp16_lm_cross_entropy": True})
    return Expressed(field="loss", note="the loss is computed in fp32: more precise")


def _state(policy: Policy) -> Expressed:
    if policy.state == "fp32":
        return Expressed(field="state")
    return Expressed(
        field="state",
        settings={**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        lost="bf16 states are rounded to nearest, not stochastically: one that changes by less than 0.2% a step does "
        "not change; set state='fp32'",
    )


def _scale(policy: Policy) -> Expressed:
    if policy.scale in ("none", 1.0) and policy.dtype != "fp16":
        return Expressed(field="scale")
    if policy.scale == "none":
        return _static(1.0)
    if isinstance(policy.scale, float):
        return _static(policy.scale)
    own = SCALE_RULES["megatron"]
    rule = policy.scale if isinstance(policy.scale, ScaleRule) else own
    if rule.is_static:
        return _static(rule.init)
    if policy.dtype != "fp16":
        return Expressed(field="scale", lost=f"no dynamic loss scale under {policy.dtype}; set scale='none'")
    differences = rule_differences(rule, own, SETTABLE)
    if not rule.floor:
        differences.append("floor 2**-126 in place of 0")
    return Expressed(
        field="scale",
        settings={
            "initial_loss_scale": float(rule.init),
            "min_loss_scale": float(rule.floor or TINY),
            "loss_scale_window": rule.interval,
            "hysteresis": rule.hysteresis,
        },
        note="the rule 'megatron'" if policy.scale == "auto" else "",
        lost=f"DynamicGradScaler has {', '.join(differences)}; set scale='megatron'" if differences else "",
    )


def _static(value: float) -> Expressed:
    return Expressed(
        field="scale",
        settings={"loss_scale": float(value)},
        note="a gradient that is not finite ends the run, unless --no-check-for-nan-in-loss-and-grad is given",
    )


def _arguments(key: str, value: Any) -> tuple[str, ...]:
    option = f"--{key.replace('_', '-')}"
    return (option,) if value is True else (option, str(value))


MEGATRON = Engine(
    name="Megatron-LM",
    method="to_megatron",
    express=_express,
    arguments=_arguments,
    text=lambda config, args: shlex.join(args),
)
