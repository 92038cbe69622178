"""Refuse prepared models in loops of the user's own whose gradients would be averaged in another format."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from halfstep.binding.fsdp import refuse_other_average
from halfstep.errors import UnbuiltError
from halfstep.policy.policy import Policy
from halfstep.torch_private.distributed import active_ddp


def asked(policy: Policy) -> str:
    """Return the field that DDP's own average does not satisfy."""
    return f"reduce={policy.reduce!r}" if policy.reduce != "grad" else f"grads={policy.grads!r} over low parameters"


def refuse_own_loop(model: nn.Module, policy: Policy) -> None:
    """Refuse a forward pass in the user's own loop whose gradients would be averaged in another format."""
    if not (torch.is_grad_enabled() and dist.is_available() and dist.is_initialized()):
        return
    ddp = active_ddp()
    if ddp is not None and ddp.require_backward_grad_sync:
        raise UnbuiltError(
            f"policy {policy.name!r}: DistributedDataParallel averages each gradient in its parameter's format, so "
            f"{asked(policy)} is not what a loop of one's own gets; train with hs.TrainStep, which averages itself, "
            "or use reduce='grad' and grads='param'"
        )
    refuse_other_average(model, policy, asked(policy))
