"""DeepSpeed: the precision sections of its JSON configuration.

Low parameters are its ``bf16`` and ``fp16`` sections: every floating parameter is lowered, fp32 masters stand behind
them on each rank's share, and operators run in the format of their inputs. fp32 parameters are its ``torch_autocast``
section: the engine's forward runs in torch.autocast.

Source: https://github.com/deepspeedai/DeepSpeed (runtime/precision_config.py, runtime/config.py, runtime/engine.py,
runtime/torch_autocast.py, runtime/fp16/loss_scaler.py), read at version 0.19.8. Its numbers hold under ZeRO 1 to 3:
without ZeRO its fp16 optimizer has neither hysteresis nor an error at the floor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from halfstep.policy.engines.engine import (
    DEVICE,
    Engine,
    Expressed,
    in_figures,
    in_words,
    rule_differences,
    wide_operators,
)
from halfstep.policy.optable import table
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule

if TYPE_CHECKING:
    from halfstep.policy.policy import Policy

__all__ = ["DEEPSPEED"]

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
SETTABLE = ("init", "interval", "hysteresis", "refill", "floor")
"""Fields of a `ScaleRule` that the fp16 section has."""

MASTERS = {
    "split": "fp32 masters: the same numbers, 2 bytes a parameter more, divided by the ranks",
    "kahan": "fp32 masters: more precise, 2 bytes a parameter more, divided by the ranks",
    "stochastic": "fp32 masters: more precise, 4 bytes a parameter more, divided by the ranks",
    "none": "fp32 masters: more precise, 4 bytes a parameter more, divided by the ranks",
}


def _express(policy: Policy) -> Iterator[Expressed]:
    yield Expressed(field="name")
    yield from (_autocast if policy.params == "fp32" else _low)(policy)
    always = policy.emulate == "always" and policy.dtype == "fp16"
    yield Expressed(field="emulate", lost="fp16 runs in the device's kernels; set emulate='auto'" if always else "")
    outputs = f"outputs stay {policy.dtype}: call .float() on them, or the loss is computed in {policy.dtype}"
    yield Expressed(field="outputs", lost=outputs if policy.outputs == "fp32" and policy.dtype != "fp32" else "")
    state = "fp32 states: more precise, at twice the bytes, divided by the ranks"
    yield Expressed(field="state", note=state if policy.state == "low" else "")


def _low(policy: Policy) -> Iterator[Expressed]:
    """Low parameters: the sections bf16 and fp16."""
    dtype, ruled = policy.dtype, policy.table not in {"none", "all-low"}
    rounds = "all operators run in the format of their inputs"
    yield Expressed(field="dtype")
    start = f"masters start from the lowered weights: what an fp32 checkpoint has beyond {dtype} is not read"
    yield Expressed(field="params", settings={f"{dtype}.enabled": True}, note=start)
    norms = f"the parameters of norms are {dtype} too, before fp32 masters; set norms='low'"
    batch = "BatchNorm's parameters are lowered too, which halfstep leaves in fp32"
    yield Expressed(
        field="norms", lost=norms if policy.norms == "fp32" else "", note=batch if policy.norms == "low" else ""
    )
    yield _masters(policy)
    grads = "fp32" if policy.grads == "fp32" else dtype
    sums = f"ZeRO 2 and 3 reduce each micro-batch and add up in {dtype} then; grads='fp32' is more precise"
    without = "with ZeRO only: DeepSpeed refuses it without"
    yield Expressed(
        field="grads", settings={"data_types.grad_accum_dtype": grads}, note=without if grads == "fp32" else sums
    )
    alike = f"{rounds}, which are {dtype} where the model makes no fp32 tensor"
    yield Expressed(
        field="table",
        lost=f"{rounds}: {in_words(wide_operators(policy))} lose fp32; set table='none'" if ruled else "",
        note=alike if policy.table == "all-low" else "",
    )
    ops = f"{rounds}: call .float() in the model, and leave ops out"
    yield Expressed(field="ops", lost=ops if policy.ops else "")
    modules = "DeepSpeed lowers every module; leave modules out"
    yield Expressed(field="modules", lost=modules if policy.modules else "")
    stream = f"embeddings give {dtype}, as their weights are, and the stream stays {dtype}"
    yield Expressed(field="residual", note=stream if policy.residual == "fp32" else "")
    yield _inputs(policy)
    loss = f"losses run in the format of their inputs: give them fp32, or they are computed in {dtype}"
    yield Expressed(field="loss", lost=loss if policy.loss == "fp32" else "")
    reduce = {"grad": grads, "fp32": "fp32", "low": dtype}[policy.reduce]
    yield Expressed(field="reduce", settings={"communication_data_type": reduce})
    yield _scale(policy) if dtype == "fp16" else _no_scale(policy)


def _masters(policy: Policy) -> Expressed:
    if policy.master == "none" and policy.dtype == "bf16":
        return Expressed(
            field="master",
            settings={"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True},
            note="with ZeRO only: DeepSpeed refuses it without",
        )
    return Expressed(field="master", note=MASTERS.get(policy.master, ""))


def _inputs(policy: Policy) -> Expressed:
    if policy.inputs == "keep":
        return Expressed(field="inputs")
    if policy.dtype == "fp16":
        return Expressed(field="inputs", settings={"fp16.auto_cast": True})
    return Expressed(field="inputs", note="cast floating inputs in the loop: torch raises where they meet bf16 weights")


def _autocast(policy: Policy) -> Iterator[Expressed]:
    """fp32 parameters: the section torch_autocast, or nothing if nothing is lowered."""
    low = policy.dtype != "fp32"
    yield Expressed(field="dtype", settings={"torch_autocast.dtype": AUTOCAST[policy.dtype]} if low else {})
    yield Expressed(field="params", settings={"torch_autocast.enabled": True} if low else {})
    yield from (Expressed(field=name) for name in ("norms", "master", "grads"))
    yield _lists(policy) if low else Expressed(field="table")
    ops = "torch.autocast's own lists: use torch.autocast(..., enabled=False) in the model, and leave ops out"
    yield Expressed(field="ops", lost=ops if low and policy.ops else "")
    modules = "one region for the whole model: use torch.autocast(..., enabled=False) in it, and leave modules out"
    yield Expressed(field="modules", lost=modules if low and policy.modules else "")
    stream = "embeddings and additions stay fp32: more precise, at twice the bytes"
    yield Expressed(field="residual", note=stream if policy.residual == "low" else "")
    inputs = "inputs stay as they are, and each product casts its own"
    yield Expressed(field="inputs", note=inputs if policy.inputs == "low" else "")
    loss = "a loss outside the engine's forward is outside the region: give it fp32, or compute it in the model"
    yield Expressed(field="loss", lost=loss if low and policy.loss == "fp32" else "")
    yield _reduced(policy) if low else Expressed(field="reduce")
    yield _autocast_scale(policy) if policy.dtype == "fp16" else _no_scale(policy)


def _lists(policy: Policy) -> Expressed:
    """torch.autocast's lists in place of the policy's; they have losses by the functions that these consist of."""
    lists, own = "torch.autocast's own lists", table("torch", DEVICE)
    if policy.table == "torch":
        return Expressed(field="table")
    if policy.table == "none":
        return Expressed(field="table", lost=f"{lists}, by which products run in {policy.dtype}; set dtype='fp32'")
    missing = wide_operators(policy, besides=frozenset(op for op, row in own.items() if row.rule == "fp32"))
    if not missing:
        return Expressed(field="table", note=f"{lists}: more operators run in fp32")
    return Expressed(field="table", lost=f"{lists}, in which {in_words(missing)} are not fp32; set table='torch'")


def _reduced(policy: Policy) -> Expressed:
    """Formats of gradients on the wire under torch_autocast: by default those of Linear and Conv layers are low."""
    if policy.reduce == "low":
        return Expressed(
            field="reduce",
            note="gradients of Linear and Conv layers only, others fp32: lower_precision_safe_modules names classes",
        )
    # also the format of ZeRO 3's all-gather: fp32 gradients cost fp32 weights on the wire
    return Expressed(field="reduce", settings={"torch_autocast.lower_precision_safe_modules": []})


# ------------------------------------------------------------------ loss scale


def _no_scale(policy: Policy) -> Expressed:
    scaled = policy.scale not in ("none", 1.0)
    return Expressed(field="scale", lost=f"no loss scale under {policy.dtype}; set scale='none'" if scaled else "")


def _autocast_scale(policy: Policy) -> Expressed:
    """ZeRO skips an update that overflows before its torch.amp.GradScaler is called, which so never learns of it."""
    lost = (
        "torch.amp.GradScaler with its default numbers, whose scale does not back off under ZeRO: once gradients "
        "overflow, every update is skipped; use params='low' or dtype='bf16'"
    )
    return Expressed(field="scale", lost=lost)


def _scale(policy: Policy) -> Expressed:
    if isinstance(policy.scale, float) or policy.scale == "none":
        return Expressed(field="scale", settings={"fp16.loss_scale": 1.0 if policy.scale == "none" else policy.scale})
    own = SCALE_RULES["deepspeed"]
    rule = policy.scale if isinstance(policy.scale, ScaleRule) else own
    if rule.is_static:
        return Expressed(field="scale", settings={"fp16.loss_scale": rule.init})
    power, floor = round(math.log2(rule.init)), max(1, round(rule.floor))
    differences = rule_differences(rule, own, SETTABLE)
    if 2.0**power != rule.init:
        differences.append(f"init {in_figures(2.0**power)} in place of {in_figures(rule.init)}")
    if floor != rule.floor:
        differences.append(f"floor {floor} in place of {in_figures(rule.floor)}")
    return Expressed(
        field="scale",
        settings={
            "fp16.loss_scale": 0,
            "fp16.initial_scale_power": power,
            "fp16.loss_scale_window": rule.interval,
            "fp16.hysteresis": rule.hysteresis,
            "fp16.consecutive_hysteresis": rule.refill == "good",
            "fp16.min_loss_scale": floor,
        },
        note="the rule 'deepspeed'" if policy.scale == "auto" else "",
        lost=f"DynamicLossScaler has {', '.join(differences)}; set scale='deepspeed'" if differences else "",
    )


def _no_arguments(key: str, value: Any) -> tuple[str, ...]:
    return ()


DEEPSPEED = Engine(
    name="DeepSpeed",
    method="to_deepspeed",
    express=_express,
    arguments=_no_arguments,
    text=lambda config, args: json.dumps(config, indent=2),
)
