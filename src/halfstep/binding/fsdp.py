"""fully_shard (FSDP2): what halfstep reads of a model that it has sharded, and how it gathers all parameters.

torch has no public way to ask for the groups of parameters that are gathered together, for their formats, and for the
state of a pass; only this file reads and sets them. It also refuses averages of gradients in another format.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halfstep.errors import BindError, StepError, UnbuiltError
from halfstep.formats import DTYPES
from halfstep.kernels.sharded import has_parts, local
from halfstep.policy.policy import Policy
from halfstep.torch_private.distributed import active_ddp, fsdp_groups, fsdp_state, is_root

ROOM = 2.0
"""Free memory that a replay needs on a device, in sizes of the whole model: its parameters and their gradients."""

MOST_ON_CPU = 1 << 32
"""Bytes of a model that are gathered on a CPU, where free memory is not known: 4 GiB, one billion fp32 parameters."""

SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info")
"""Settings of a group of parameters of FSDP; there are functions to set them, none to read them."""


def is_fsdp(module: nn.Module) -> bool:
    """Return whether fully_shard was called on `module` itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_distributed(model: nn.Module) -> bool:
    """Return whether `fully_shard` or `parallelize_module` has distributed parameters of `model`."""
    return any(map(is_fsdp, model.modules())) or has_parts(model)


def is_gathered(model: nn.Module) -> bool:
    """Return whether a model under `fully_shard` has all its parameters here at the moment."""
    return any(map(is_fsdp, model.modules())) and not has_parts(model)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the parameters of `model` are the sharded ones, also after a forward pass."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def _states(model: nn.Module) -> list[Any]:
    """Return what fully_shard keeps for each module it was called on; several modules can share one."""
    states: list[Any] = [fsdp_state(module) for module in model.modules() if is_fsdp(module)]
    return list({id(state): state for state in states}.values())


def _groups(model: nn.Module) -> list[Any]:
    """Return the groups of parameters that fully_shard gathers together."""
    return [group for state in _states(model) for group in fsdp_groups(state)]


def has_run(model: nn.Module) -> bool:
    """Return whether fully_shard has fixed the formats of the parameters, as it does in the first forward pass."""
    return any(is_root(state) is not None for state in _states(model))


def check_groups(model: nn.Module, dtypes: dict[int, torch.dtype], low: Iterable[str]) -> None:
    """Refuse to give the parameters of `model` formats that fully_shard cannot gather together, or any more."""
    first = next(iter(low), None)
    if first is not None and has_run(model):
        raise BindError(
            f"parameter {first} is to be lowered, and fully_shard has fixed its format in the first forward pass; call "
            "hs.prepare before that, or hs.shard(model, policy) in place of fully_shard"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    for group in _groups(model):
        members = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        found = {dtypes.get(id(p), p.dtype): names.get(id(p), "?") for p in members}
        if len(found) > 1:
            kinds = " and ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in found.items())
            raise BindError(
                f"fully_shard gathers parameters of one format together, and this group gets two: {kinds}; "
                "hs.shard(model, policy) makes groups that fit the policy, or call fully_shard on the modules of one "
                "format first"
            )


def refuse_other_average(model: nn.Module, policy: Policy, asked: str) -> None:
    """Refuse a sharded model whose gradients fully_shard sums in another format than the policy's `reduce`."""
    groups = _groups(model)
    if not groups and not is_distributed(model):
        return
    if policy.params == "low" and policy.grads == "fp32":
        raise UnbuiltError(
            f"policy {policy.name!r}: grads='fp32' over low parameters is carried out under DistributedDataParallel "
            "only: fully_shard accumulates the gradients of micro-batches in the format of their parameter; use "
            "grads='param', with reduce='fp32' if ranks are many"
        )
    wanted = torch.float32 if policy.reduce == "fp32" else DTYPES[policy.dtype]
    for group in groups:
        for parameter in group.fsdp_params:
            formats = getattr(parameter, "mp_policy", None) or group.mp_policy  # of each parameter from torch 2.15 on
            found = formats.reduce_dtype or formats.param_dtype or parameter.sharded_param.dtype
            if found is not wanted:
                raise UnbuiltError(
                    f"policy {policy.name!r}: {asked}, and fully_shard sums gradients in "
                    f"{str(found).removeprefix('torch.')}; use hs.shard(model, policy), or fully_shard(..., "
                    f"mp_policy=MixedPrecisionPolicy(reduce_dtype={wanted}))"
                )


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


def gather_as_others(model: nn.Module) -> list[Any]:
    """Have weights that `fp8.gather` was called with gathered as others are; return them, with what they were."""
    pairs = [(vars(p), vars(local(p.sharded_param))) for group in _groups(model) for p in group.fsdp_params]
    found = [(own, asked, own.copy(), asked.copy()) for own, asked in pairs if "fsdp_pre_all_gather" in asked]
    for own, asked, *_ in found:
        own.pop("_unsharded_param", None)
        own["all_gather_outputs"] = []
        del asked["fsdp_pre_all_gather"], asked["fsdp_post_all_gather"]
    return found


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Have all parameters of a model under `fully_shard` in one place in a block. Entering is collective.

    Meanwhile FSDP's hooks gather and reduce nothing, so that each rank can run any number of passes.
    """
    modules: list[Any] = [module for module in model.modules() if is_fsdp(module)]
    groups = _groups(model)
    reshard(model)
    otherwise = gather_as_others(model)  # a replay and its evidence read all weights alike
    switches = [{name: getattr(group, name) for name in SWITCHES} for group in groups]
    try:
        for module in modules:
            module.unshard()
        if has_parts(model):
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
        _forget_passes(model, groups)
        reshard(model)
        for own, asked, before, functions in otherwise:
            own.pop("_unsharded_param", None)
            own.update(before)
            asked.update(functions)


def _forget_passes(model: nn.Module, groups: list[Any]) -> None:
    """Have FSDP forget passes that were not run to their end: a forward pass that raised, or without backward pass."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # slow to import; it is by now

    for state in _states(model):
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
    for group in groups:
        group._training_state = TrainingState.IDLE
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
