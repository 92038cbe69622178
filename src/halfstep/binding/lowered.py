"""Lowering: a plain copy of a model for serving, whose weights are cast once.

In: a model, prepared or with a policy that has low parameters. Out: a copy of the user's own classes, without binding
and without precise weights, which needs no halfstep: it can be pickled, compiled, exported, and saved by its library.

Note [norms]: beside low inputs and fp32 statistics torch's kernels of BatchNorm take fp32 weights only. Those of
LayerNorm and GroupNorm take them on a CPU; elsewhere a policy casts the weights of these two at each call, and here
they are cast once. A norm written in Python multiplies by its weight, and an fp32 one would make its output fp32, which
the next layer refuses: its weight becomes low.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from halfstep.arguments import MODEL, check
from halfstep.binding.bind import binding_of
from halfstep.binding.prepare import prepare, store_of, unprepare
from halfstep.binding.wrappers import unwrap
from halfstep.errors import BindError, PolicyError
from halfstep.formats import DTYPES
from halfstep.kernels.sharded import is_sharded, put
from halfstep.kernels.watched import unwatch_copies
from halfstep.policy.plan import Plan, resolve
from halfstep.policy.policy import Policy
from halfstep.torch_private.modules import NormBase

ModelT = TypeVar("ModelT", bound=nn.Module)


def lowered(model: ModelT, *, policy: Policy | str | Path | None = None) -> ModelT:
    """Return a plain copy of `model` for serving, with its weights cast once; it needs no halfstep to run.

    The copy and all its parts are of the user's own classes; it is in evaluation mode, and its parameters take no
    gradients. Parameters have the formats of the policy's plan (``hs.resolve``), and operators compute in the formats
    of their inputs: give it low inputs, and it returns low outputs. Rules for operators (`exp` in fp32) are not
    followed; `hs.exported` follows them all. The model stays as it is.

    Args:
        model: prepared, or a plain model with `policy`.
        policy: for a model that is not prepared, or to lower a prepared one by another policy: ``"pure"`` makes norms
            low too, which is the format that libraries save and load.

    Raises:
        BindError: no policy is given and the model is not prepared, or it is sharded.
        PolicyError: the policy keeps fp32 parameters and lowers operators, which no plain module does, or has rules for
            operators, or modules in fp32.

    Examples:
        >>> served = hs.lowered(model, policy=hs.Policy.of("pure", dtype="bf16"))
        >>> served(x.bfloat16()).dtype
        torch.bfloat16
    """
    check("hs.lowered", BindError, model=(model, MODEL))
    wanted = _policy_of(model) if policy is None else Policy.of(policy)
    plan = resolve(wanted, unwrap(model))
    _refuse(plan.policy)
    made = twin(model, policy, bound=False)
    _cast_weights(made, plan)
    return made


def _policy_of(model: nn.Module) -> Policy:
    binding = binding_of(unwrap(model))
    if binding is None:
        raise BindError("the model is not prepared: pass policy=, or the model that was given to hs.prepare")
    return binding.wanted


def twin(model: ModelT, policy: Policy | str | Path | None, *, bound: bool) -> ModelT:
    """Return a copy of `model` in evaluation mode, with the low weights it computes with, and no gradients."""
    inner: Any = unwrap(model)
    if policy is None:
        _policy_of(model)
    if any(is_sharded(parameter) for parameter in inner.parameters()):
        raise BindError(
            "the model is sharded, and a copy for serving holds whole weights: load its state_dict into a plain model, "
            "and give that with policy="
        )
    made: Any = copy.deepcopy(inner)
    unwatch_copies(made.parameters())
    if binding_of(made) is not None and (policy is not None or not bound):
        unprepare(made)
    if policy is None:
        store = store_of(inner)
        for mine, own in zip(made.parameters(), inner.parameters(), strict=True):
            if store is not None and own in store:  # its very bits: `stochastic` does not round to nearest
                put(mine, Tensor.detach(own).clone())
    elif bound:
        prepare(made, policy=policy)
    made.eval().requires_grad_(False)
    return made  # type: ignore[no-any-return]


def _refuse(policy: Policy) -> None:
    """Refuse a policy that no plain module can follow."""
    remedy = "hs.exported(model, inputs) makes a program that does"
    if policy.params == "fp32" and policy.dtype != "fp32":
        raise PolicyError(
            f"policy {policy.name!r} keeps fp32 parameters and casts them in operators, which no plain module does; "
            f"{remedy}, and hs.lowered(model, policy='pure') makes every weight low"
        )
    modules = {pattern: rule for pattern, rule in policy.modules if rule != "low"}
    for field, what, value in (("ops", "operators", dict(policy.ops)), ("modules", "modules", modules)):
        if value:
            raise PolicyError(
                f"policy {policy.name!r} has rules for {what} ({field}={value!r}), which a plain module does not "
                f"follow; {remedy}"
            )


def _cast_weights(model: nn.Module, plan: Plan) -> None:
    """Bring the parameters of a plain model into the formats of its plan; see note [norms]."""
    kernels = (NormBase, nn.LayerNorm, nn.GroupNorm) if plan.device == "cpu" else (NormBase,)
    norms = [module for module in model.modules() if isinstance(module, kernels)]
    may = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    must = {
        id(parameter)
        for norm in norms
        if isinstance(norm, NormBase) and norm.running_mean is not None and norm.running_mean.dtype is torch.float32
        for parameter in norm.parameters(recurse=False)
    }
    low = DTYPES[plan.policy.dtype]
    for decision in plan.parameters:
        parameter = model.get_parameter(decision.name)
        value = Tensor.detach(parameter)
        if decision.low or id(parameter) not in may:
            value = value.to(low)
        if id(parameter) in must:
            value = value.float()
        if parameter.dtype is not value.dtype or value.data_ptr() != parameter.data_ptr():
            put(parameter, value)
