"""Wrappers that libraries put around models and optimizers, known by the names of their classes; the user's inside."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfstep.errors import BindError
from halfstep.optim import Optimizers
from halfstep.torch_private.compiler import original_of
from halfstep.torch_private.distributed import IN_FSDP1, in_flat_parameter
from halfstep.weights.attachment import missing

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
            inner = original_of(model)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def refuse_flat(model: nn.Module) -> None:
    """Refuse a model whose parameters, or some of them, FullyShardedDataParallel has made pieces of one flat tensor."""
    parts = [path for path, module in model.named_modules() if is_called(module, "FullyShardedDataParallel")]
    if not parts:
        kept = list(model.parameters())
        # in its forward passes parameters are views of the flat tensor, or none
        views = IN_FSDP1 in model.__dict__ and not any(isinstance(p, nn.Parameter) for p in kept)
        if not views and not any(map(in_flat_parameter, kept)):
            return
    path = "".join(parts[:1])
    raise BindError(
        f"{f'module {path!r}' if path else 'the model'} is sharded by FullyShardedDataParallel, whose parameters are "
        "pieces of one flat tensor, on which precise weights, norms and skips of a step are not those of the model; "
        "use hs.shard(model, policy) in its place, which calls fully_shard"
    )


def cuts_hooks(model: nn.Module) -> bool:
    """Return whether a wrapper of `model` refers to its present parameters, as DDP's hooks and Dynamo's guards do."""
    within = model._modules.get("_forward_module") if is_called(model, FABRIC) else model
    return within is not None and unwrap(within) is not within


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside the wrappers of accelerate, Lightning and Fabric; one of a list or a dict."""
    is_named = isinstance(optimizer, Mapping)
    if is_named or isinstance(optimizer, (list, tuple)):
        several = [unwrap_optimizer(one) for one in (optimizer.values() if is_named else optimizer)]
        if not several or not all(isinstance(one, Optimizer) for one in several):
            return optimizer  # the caller refuses it
        return Optimizers(dict(zip(optimizer, several, strict=True)) if is_named else several)
    if not isinstance(optimizer, Optimizer):
        return optimizer  # here too
    while any(is_called(optimizer, name) for name in OPTIMIZERS):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is optimizer:
            break
        optimizer = inner
    if name := missing(optimizer):
        raise BindError(
            f"{type(optimizer).__name__} has no {name}, which torch.optim.Optimizer.__init__ makes; if it is a "
            "wrapper, give hs.prepare the optimizer in it, before it is wrapped; if it is a class of yours, call "
            "super().__init__(params, defaults) in its __init__"
        )
    return optimizer
