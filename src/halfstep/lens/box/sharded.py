"""Sharded models: all parameters of a model under `fully_shard` in one place, for replays on each rank alone.

The parameters are gathered once, by FSDP's own `unshard`, which is collective. While they are there, FSDP's hooks find
nothing to gather and are set to reduce nothing, so that each rank can run as many forward and backward passes as it
needs, with the casts of FSDP's own policy. Afterwards FSDP is as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from halfstep.errors import StepError
from halfstep.lens.calls import extremes, is_sharded

__all__ = ["bad_parts", "fits", "has_room", "is_gathered", "unsharded", "whole_state"]

ROOM = 2.0
"""Free memory that is needed on a device, in sizes of the whole model."""

MOST_ON_CPU = 1 << 32
"""Bytes that a gathered model, or a trial, may take on a CPU, where free memory is not known."""

SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info")
"""Settings of a group of parameters of FSDP; there are functions to set them, none to read them."""


def bad_parts(model: nn.Module) -> list[str]:
    """Return the names of parameters that are not finite, of sharded ones in the part that this rank has."""
    return [name for name, parameter in model.named_parameters() if not extremes(parameter)[1]]


def is_gathered(model: nn.Module) -> bool:
    """Return whether a model under `fully_shard` has all its parameters here at the moment."""
    return not is_sharded(model) and any(
        kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__
    )


def has_room(model: nn.Module) -> bool:
    """Return whether all parameters of a sharded model would fit here."""
    parts = [p for p in model.parameters() if hasattr(p, "placements")]
    size = sum(p.numel() * p.element_size() for p in parts)  # of all ranks
    device = parts[0].device
    return fits(size if device.type == "cpu" else int(ROOM * size), device)


def fits(size: int, device: torch.device) -> bool:
    """Return whether a device has so many bytes of memory left; on a CPU whether that is at most `MOST_ON_CPU`."""
    if device.type == "cpu":
        return size <= MOST_ON_CPU
    try:
        torch.empty(size, dtype=torch.uint8, device=device)  # given back at once, and cached by torch
    except RuntimeError:
        return False
    return True


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Have all parameters of a model under `fully_shard` in one place in a block. Entering is collective.

    Raises:
        StepError: they are sharded by something else too.
    """
    from torch.distributed.fsdp import FSDPModule  # takes long, and a sharded model has it already

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [module._get_fsdp_state() for module in modules]
    groups = [group for state in states for group in _groups(state)]
    switches = [{name: getattr(group, name) for name in SWITCHES} for group in groups]
    try:
        for module in modules:
            module.unshard()
        if is_sharded(model):
            raise StepError("tensor parallel layers communicate, and a replay runs on one rank alone")
        for group in groups:
            # the root is not resharded after its forward pass either: post_forward_mesh_info is None there
            group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = False
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, known in zip(groups, switches, strict=True):
            for name, value in known.items():
                setattr(group, name, value)
        _reset(states)
        for module in modules:
            module.reshard()


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters of an FSDP module: several since torch 2.12, before that one or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reset(states: list[Any]) -> None:
    """Have FSDP forget passes that were not run to their end: a forward pass that raised, or without backward pass."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for state in states:
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        for group in _groups(state):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name, those that are gathered at the moment too.

    Of a model under `fully_shard` its own `state_dict` would return the parts, and take the rest away.
    """
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    found.update((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n not in transient)
    return found
