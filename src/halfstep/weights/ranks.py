"""Ranks of DistributedDataParallel: the wrapper whose forward pass runs, and communication hooks that cannot run."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.errors import UnbuiltError
from halfstep.torch_private.distributed import active_ddp, backend_of, comm_hooks, first_bucket_bytes

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

    gloo has two threads for callbacks and collectives; hooks of `WAITING` wait in a callback for a collective, so two
    buckets of gradients block both. One bucket has one format and at most DistributedDataParallel's first limit.
    """
    waiting = [hook for hook, _ in comm_hooks(wrapper) if _waits(hook)]
    ignored = wrapper.parameters_to_ignore
    trained = [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]
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
