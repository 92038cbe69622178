"""Wrappers around models and optimizers: which are taken off, and which a policy cannot pass.

A policy is bound to the user's model, and weights are stepped by the user's optimizer; what libraries put around both
is found by the names of their classes, since none of these libraries is imported. `hs.prepare` returns what it was
given: a wrapper calls what is in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import BindError

__all__ = ["cuts_hooks", "refuse_foreign", "refuse_own_forwards", "unwrap", "unwrap_optimizer"]

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
FABRIC = "_FabricModule"
OPTIMIZERS = frozenset({"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"})
"""Classes of accelerate, Lightning and Fabric that pass `step` on to the optimizer in their attribute `optimizer`."""

SHARDED = {
    "FSDPModule": "sharded by fully_shard; call hs.prepare before fully_shard",
    "FullyShardedDataParallel": "sharded by FullyShardedDataParallel, whose parameters are flat pieces; call "
    "hs.prepare first, then fully_shard",
    "DeepSpeedEngine": "run by DeepSpeed, which casts weights and scales losses itself; give hs.prepare the model "
    "without it",
}


def _is(value: object, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(value).__mro__)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model inside DistributedDataParallel, DataParallel, torch.compile and Fabric wrappers."""
    while True:
        if isinstance(model, WRAPPERS):
            inner = model.module
        elif _is(model, FABRIC):
            inner = model._modules.get("_original_module") or model._modules.get("_forward_module")
        else:
            inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def cuts_hooks(model: nn.Module) -> bool:
    """Return whether `model` is wrapped in something that holds on to the parameters as they are.

    DistributedDataParallel has hooks on them, torch.compile guards; Fabric's wrapper calls the model, or one of these.
    """
    within = model._modules.get("_forward_module") if _is(model, FABRIC) else model
    return within is not None and unwrap(within) is not within


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside the wrappers of accelerate, Lightning and Fabric.

    Raises:
        BindError: a wrapper that is not known, and that has no hooks by which it could step fp32 weights.
    """
    if not isinstance(optimizer, Optimizer):
        return optimizer  # the caller says what is wrong with it
    while any(_is(optimizer, name) for name in OPTIMIZERS):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is optimizer:
            break
        optimizer = inner
    try:
        hooks = optimizer._optimizer_step_pre_hooks
    except AttributeError:
        hooks = None
    if hooks is None:
        raise BindError(
            f"{type(optimizer).__name__} has none of the hooks that torch.optim.Optimizer.__init__ makes; if it is a "
            "wrapper, give hs.prepare the optimizer in it, before it is wrapped"
        )
    return optimizer


def refuse_foreign(model: nn.Module) -> None:
    """Refuse a model with parts that no policy can be bound to.

    Raises:
        BindError: it, or a part of it, is compiled by torch.jit, or is sharded or run by a library already.
    """
    for path, module in model.named_modules():
        what = f"module {path or '<root>'!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise BindError(
                f"{what} is a {type(module).__name__}: its compiled code looks at no rules; give hs.prepare the "
                "torch Module that it was made from"
            )
        for name, why in SHARDED.items():
            if _is(module, name) and "_halfstep" not in module.__dict__:
                raise BindError(f"{what} is already {why}")


def refuse_own_forwards(modules: Iterable[tuple[str, nn.Module, str, bool]]) -> None:
    """Refuse a forward that is set on an instance, where a region would have to be opened: it hides the class' own.

    Args:
        modules: (path, module, rule, whether it is the outermost one with that rule).

    Raises:
        BindError: which module, and what to do.
    """
    for path, module, _, entrance in modules:
        if "forward" in module.__dict__ and "_halfstep" not in module.__dict__ and (entrance or not path):
            raise BindError(
                f"{f'module {path!r}' if path else 'the model'} has a forward of its own, set on the instance, which "
                "would run outside the policy's region (accelerate's mixed precision and device hooks set one, and "
                "model.forward = ...); call hs.prepare first, or undo it (del model.forward, "
                'Accelerator(mixed_precision="no"), accelerate.hooks.remove_hook_from_module(model, recurse=True))'
            )
