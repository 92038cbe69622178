"""Ranks of DistributedDataParallel, which makes low weights equal when it wraps a model, and not what is beside them.

The rest is sent from the wrapper's first rank too, at the first call that all ranks are known to reach: `hs.prepare` or
`hs.TrainStep` of the wrapped model, or the first forward pass that trains it. Where compiled code hides these calls,
`master` on every rank takes over the broadcast low weights as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from halfstep.weights.store import WeightStore

__all__ = ["broadcast", "replicated", "training_wrapper"]


def training_wrapper(module: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper around `module` whose forward pass, with gradients to be reduced, is running; else None."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or wrapper.module is not module:
        return None
    return wrapper if wrapper.require_backward_grad_sync and torch.is_grad_enabled() else None


@torch.no_grad()
def broadcast(store: WeightStore, wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    """Give every rank of `wrapper` the low weights of its first rank and what is beside them; return these weights.

    Collective: every rank must reach this call.
    """
    named = wrapper.module.named_parameters()
    parameters = [p for name, p in named if p in store and name not in wrapper.parameters_to_ignore]
    whole = [p for p in parameters if not store.is_frozen(p)]
    parts = [part.detach() for p in whole for part in store._parts(id(p)) if part is not None]
    parts += [p.detach() for p in parameters if store.is_frozen(p)]
    # backends of torch.distributed take no int16
    from torch.distributed import _broadcast_coalesced  # type: ignore[attr-defined]  # DistributedDataParallel's own

    sent = [part.view(torch.float16) if part.dtype is torch.int16 else part for part in parts]
    if sent:
        bucket = int(wrapper.broadcast_bucket_size)
        _broadcast_coalesced(wrapper.process_group, sent, bucket, 0)
    return parameters


def replicated() -> bool:
    """Return whether torch.distributed runs more than one process."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() > 1
