"""Ranks of DistributedDataParallel, which makes low weights equal when it wraps a model, and not what is beside them.

The rest is sent from the wrapper's first rank too, at the first call that all ranks are known to reach: `hs.prepare` or
`hs.TrainStep` of the wrapped model, or the first forward pass that trains it. Where compiled code hides these calls,
`master` on every rank takes over the broadcast low weights as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import UnbuiltError
from halfstep.torch_private.distributed import (
    active_ddp,
    backend_of,
    broadcast_coalesced,
    comm_hooks,
    first_bucket_bytes,
)

if TYPE_CHECKING:
    from halfstep.weights.store import WeightStore

WAITING = (".powerSGD_hook", ".quantization_hooks")
"""Modules of torch whose communication hooks wait for a collective in the callback of another one."""


def training_wrapper(module: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper around `module` whose forward pass, with gradients to be reduced, is running; else None."""
    wrapper = active_ddp()
    if wrapper is None or wrapper.module is not module:
        return None
    if not (wrapper.require_backward_grad_sync and torch.is_grad_enabled()):
        return None
    if comm_hooks(wrapper):
        refuse_waiting_hook(wrapper)
    return wrapper


def refuse_waiting_hook(wrapper: DistributedDataParallel) -> None:
    """Refuse a communication hook whose callbacks can wait for each other for good.

    gloo has two threads for callbacks and collectives. The hooks of `WAITING` wait in a callback for a collective that
    needs a thread, so two buckets of gradients block both. One bucket has one format and no more than
    DistributedDataParallel's limit for the first of them.
    """
    waiting = [hook for hook, _ in comm_hooks(wrapper) if _waits(hook)]
    trained = [
        parameter
        for name, parameter in wrapper.module.named_parameters()
        if parameter.requires_grad and name not in wrapper.parameters_to_ignore
    ]
    if not waiting or backend_of(wrapper.process_group, trained[0].device) != "gloo":
        return
    formats = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
    size = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    limit = min(first_bucket_bytes(), wrapper.bucket_bytes_cap)
    if len(formats) > 1 or (size > limit and len(trained) > 1):
        raise UnbuiltError(
            f"the communication hook {getattr(waiting[0], '__name__', waiting[0])!r} waits for a collective in the "
            f"callback of another, and gradients of {' and '.join(formats)} ({size} bytes) are sent in several "
            "buckets: over gloo they wait for each other for good; leave the hook out, use the backend nccl, or, up to "
            f"{limit} bytes of gradients, a policy that keeps all parameters in one format ('mixed')"
        )


def _waits(hook: object) -> bool:
    """Return whether `hook`, or one that it was made of, is of `WAITING`."""
    inside = [getattr(hook, "func", None), *(c.cell_contents for c in getattr(hook, "__closure__", None) or ())]
    return str(getattr(hook, "__module__", "")).endswith(WAITING) or any(map(_waits, filter(callable, inside)))


@torch.no_grad()
def broadcast(store: WeightStore, wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    """Give every rank of `wrapper` the low weights of its first rank and what is beside them; return these weights.

    Collective: every rank must reach this call.
    """
    named = wrapper.module.named_parameters()
    parameters = [p for name, p in named if p in store and name not in wrapper.parameters_to_ignore]
    whole = [p for p in parameters if not store.is_frozen(p)]
    parts = [Tensor.detach(part) for p in whole for part in store._parts(id(p)) if part is not None]
    parts += [Tensor.detach(p) for p in parameters if store.is_frozen(p)]
    # backends of torch.distributed take no int16
    sent = [part.view(torch.float16) if part.dtype is torch.int16 else part for part in parts]
    if sent:
        bucket = int(wrapper.broadcast_bucket_size)
        broadcast_coalesced(wrapper.process_group, sent, bucket, 0)
    return parameters


def replicated() -> bool:
    """Return whether torch.distributed runs more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
