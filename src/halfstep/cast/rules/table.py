"""Rules: a policy compiled for devices into the table callable -> handler of a region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.cast.arithmetic.emulate import EMULATED, RECURRENT, WIDENED
from halfstep.cast.arithmetic.norms import NORMS, of_norm
from halfstep.cast.losses.linear_loss import linear_cross_entropy
from halfstep.cast.rules.composites import composites, cross_entropy_in_parts, unreported
from halfstep.cast.rules.dispatch import NATIVELY, Handler, Lowering
from halfstep.cast.rules.handlers import (
    IN_PLACE,
    INPUT,
    data_asked,
    into_destination,
    of_composite,
    of_rule,
    of_statistics,
)
from halfstep.cast.rules.linear_loss import of_linear_loss
from halfstep.policy.operators import LINEAR_LOSS, callables, operator_name
from halfstep.policy.optable import table
from halfstep.policy.policy import Policy
from halfstep.policy.resolve import Decision, operator_rules

__all__ = ["compile_rules"]


def _torch_rule(name: str, device: str) -> str | None:
    row = table("torch", device).get(name)
    return None if row is None else row.rule


def _native(name: str, rule: str, devices: tuple[str, ...]) -> bool:
    """Return whether torch.autocast does the same with this operator on every one of `devices`."""
    return rule in {"low", "fp32"} and all(_torch_rule(name, device) == rule for device in devices)


def compile_rules(
    policy: Policy, devices: tuple[str, ...], how: Lowering = NATIVELY
) -> Mapping[Callable[..., Any], Handler]:
    """Compile `policy` for `devices` into the table callable -> handler.

    Args:
        policy: what is wanted.
        devices: device types of the region, e.g. ("cuda", "cpu"); a rule is handled if torch differs on any of them.
        how: how low operators are carried out.

    Returns:
        The handlers of all operators that torch.autocast alone would treat differently; empty if there are none.
    """
    decisions: dict[str, Decision] = {}
    for device in reversed(devices):
        decisions.update(operator_rules(policy, device))
    rules: dict[str, str] = {}
    for name, decision in decisions.items():
        if decision.rule == "low" and (how.simulated or (how.emulating and (name in EMULATED or name in WIDENED))):
            rules[name] = "low"
        elif policy.table == "torch" and decision.origin == "table":
            continue  # the real autocast region underneath is the table
        elif not _native(name, decision.rule, devices) or (name == "cross_entropy" and decision.rule == "fp32"):
            rules[name] = decision.rule
    if policy.table != "torch":
        listed = {name for device in devices for name in table("torch", device)}
        rules.update(dict.fromkeys(listed - decisions.keys(), INPUT))
    if how.emulating and policy.table == "torch":
        # torch lowers them on CUDA; on the CPU their insides would run in fp16 kernels that are slow or do not exist
        rules.update(dict.fromkeys(RECURRENT - decisions.keys(), "low"))
    compiled: dict[Callable[..., Any], Handler] = {}
    if rules:
        spellings = (getattr(space, name, None) for name in ("__setitem__", *IN_PLACE) for space in (Tensor, torch))
        compiled.update({spelled: into_destination for spelled in spellings if spelled is not None})
    product = rules.pop(LINEAR_LOSS, rules.get("linear"))
    if product is not None:
        loss = decisions.get("cross_entropy")
        wide = loss is not None and loss.rule == "fp32" and how.simulated is None
        spelled = (linear_cross_entropy, *callables(LINEAR_LOSS))
        compiled.update(dict.fromkeys(spelled, of_linear_loss(product, how, fused=wide)))
    for name, rule in rules.items():
        for func in callables(name):
            compiled[func] = of_rule(name, rule, func, how, native=_native(name, rule, devices))
    if policy.params == "low":
        for func in (F.batch_norm, F.instance_norm):
            compiled.setdefault(func, of_statistics())
    if "cpu" in devices and policy.dtype == "fp16" and policy.emulate != "never":
        compiled.update({func: of_norm(compiled.get(func), func) for func in NORMS})
    for composite in composites(frozenset(rules)):
        if composite not in compiled and operator_name(composite) not in decisions:
            compiled[composite] = of_composite(unreported(composite))
    if compiled:
        compiled[Tensor.data.__get__] = data_asked  # type: ignore[attr-defined]  # a descriptor of C
    if "cross_entropy" not in decisions and rules.keys() & {"log_softmax", "nll_loss"}:
        compiled[F.cross_entropy] = of_composite(cross_entropy_in_parts)
    return compiled
