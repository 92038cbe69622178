"""Processes: DistributedDataParallel, fully_shard, DTensors, stores; some builds of torch lack these."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

local_of: Any = attrgetter("_local_tensor")
"""The part of a DTensor that this rank has."""

spec_of: Any = attrgetter("_spec")
"""The mesh, the placements and the shape of a DTensor."""

comm_hooks: Any = attrgetter("_comm_hooks")
"""The (hook, state) pairs of a DistributedDataParallel."""

is_joining = attrgetter("_join_config.enable")
"""Whether DDP's own `join` was entered."""

has_recorded_static_graph = attrgetter("_static_graph_delay_allreduce_enqueued")
"""Whether DDP has delayed the reduction of its first backward pass, in which it records a static graph."""

IN_FSDP1 = "_is_fsdp_managed_module"
"""The attribute of modules that FullyShardedDataParallel manages."""

is_root = attrgetter("_is_root")
"""Whether a state of fully_shard is that of a root; None before its first forward pass."""


def active_ddp() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward pass is running; Dynamo guards on it."""
    return DistributedDataParallel._active_ddp_module


def set_local(sharded: Any, whole: Any) -> None:
    """Let a DTensor compute with the part and the placements of another one."""
    sharded._local_tensor, sharded._spec = local_of(whole), spec_of(whole)


def communicate_as_first_forward(ddp: DistributedDataParallel) -> None:
    """Rebuild the buckets and send the buffers, as the first forward pass of a window does; collective."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    if ddp._check_sync_bufs_pre_fwd():
        ddp._sync_buffers()


def renew_reducer(ddp: DistributedDataParallel) -> None:
    """Make what averages gradients anew, for parameters in other formats, as DDP does when it is unpickled."""
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()  # type: ignore[union-attr]


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return what DDP logs of itself; its communication hook, those of C++ too, is "comm_hook"."""
    found: dict[str, Any] = ddp._get_ddp_logging_data()
    return found


def overlaps_with_ddp(optimizer: Any) -> bool:
    """Return whether a ZeroRedundancyOptimizer updates parameters in DDP's backward pass."""
    return bool(getattr(optimizer, "_overlap_with_ddp", False))


def backend_of(group: Any, device: torch.device) -> str:
    """Return the name of a process group's backend for a device."""
    return str(group._get_backend(device).name())


def first_bucket_bytes() -> int:
    """Return DDP's limit of the first bucket of gradients, in bytes."""
    limit: int = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return limit


def broadcast_coalesced(group: Any, tensors: list[Tensor], bucket_bytes: int, source: int) -> None:
    """Send tensors from rank `source` to all others, a bucket at a time; collective."""
    torch.distributed._broadcast_coalesced(group, tensors, bucket_bytes, source)  # type: ignore[attr-defined]


def default_store() -> Any:
    """Return the store of the default process group; torch's stubs lack some of its methods."""
    return torch.distributed.distributed_c10d._get_default_store()


def fsdp_state(module: nn.Module) -> Any:
    """Return what fully_shard keeps for a module that it was called on."""
    return module._get_fsdp_state()  # type: ignore[operator]


def fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that fully_shard gathers together: several in torch 2.13, at most one before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def in_flat_parameter(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is FullyShardedDataParallel's flat one, or a piece of it."""
    return hasattr(parameter, "_is_flat_param") or hasattr(parameter, "_fsdp_flattened")
