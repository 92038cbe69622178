"""Wrappers that libraries put around models and optimizers: how the user's own is found inside.

A policy is bound to the user's model, and the user's optimizer steps weights. Wrappers are recognised by the names of
their classes, since none of these libraries is imported.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfstep.errors import BindError

__all__ = ["cuts_hooks", "is_called", "unwrap", "unwrap_optimizer"]

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
FABRIC = "_FabricModule"
OPTIMIZERS = frozenset({"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"})
"""Classes of accelerate, Lightning and Fabric that pass `step` on to the optimizer in their attribute `optimizer`."""


def is_called(value: object, name: str) -> bool:
    """Return whether the class of `value`, or one of its bases, is called `name`."""
    return any(kind.__name__ == name for kind in type(value).__mro__)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model inside DistributedDataParallel, DataParallel, torch.compile and Fabric wrappers."""
    while True:
        if isinstance(model, WRAPPERS):
            inner = model.module
        elif is_called(model, FABRIC):
            inner = model._modules.get("_original_module") or model._modules.get("_forward_module")
        else:
            inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def cuts_hooks(model: nn.Module) -> bool:
    """Return whether `model` is wrapped in something that refers to the present parameters.

    DistributedDataParallel has hooks on them, torch.compile guards; Fabric's wrapper calls the model, or one of these.
    """
    within = model._modules.get("_forward_module") if is_called(model, FABRIC) else model
    return within is not None and unwrap(within) is not within


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside the wrappers of accelerate, Lightning and Fabric.

    Raises:
        BindError: a wrapper that is not known, and that has no hooks by which it could step fp32 weights.
    """
    if not isinstance(optimizer, Optimizer):
        return optimizer  # the caller refuses it
    while any(is_called(optimizer, name) for name in OPTIMIZERS):
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
