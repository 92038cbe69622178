"""fully_shard (FSDP2): what halfstep reads of a model that it has sharded.

torch has no public way to ask for the groups of parameters that are gathered together, and for their formats; this file
is the only one that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from halfstep.errors import BindError, UnbuiltError
from halfstep.formats import DTYPES
from halfstep.kernels.sharded import is_sharded
from halfstep.policy.policy import Policy
from halfstep.torch_private.distributed import fsdp_groups, fsdp_state, is_root

__all__ = ["check_groups", "has_run", "is_distributed", "is_fsdp", "refuse_other_average", "reshard"]


def is_fsdp(module: nn.Module) -> bool:
    """Return whether fully_shard was called on `module` itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_distributed(model: nn.Module) -> bool:
    """Return whether `fully_shard` or `parallelize_module` has distributed parameters of `model`."""
    return any(map(is_fsdp, model.modules())) or any(map(is_sharded, model.parameters()))


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the parameters of `model` are the sharded ones, also after a forward pass."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def _states(model: nn.Module) -> Iterator[Any]:
    """Iterate over what fully_shard keeps for each module it was called on; several modules can share one."""
    seen = set[int]()
    for module in model.modules():
        if is_fsdp(module):
            state: Any = fsdp_state(module)
            if id(state) not in seen:
                seen.add(id(state))
                yield state


def _groups(model: nn.Module) -> Iterator[Any]:
    """Iterate over the groups of parameters that fully_shard gathers together."""
    for state in _states(model):
        yield from fsdp_groups(state)


def has_run(model: nn.Module) -> bool:
    """Return whether fully_shard has fixed the formats of the parameters, as it does in the first forward pass."""
    return any(is_root(state) is not None for state in _states(model))


def check_groups(model: nn.Module, dtypes: dict[int, torch.dtype], low: Iterable[str]) -> None:
    """Refuse to give the parameters of `model` formats that fully_shard cannot gather together, or any more.

    Args:
        model: as the user gave it; nothing is checked where fully_shard was not called.
        dtypes: the formats parameters are to have, by id.
        low: names of parameters to be lowered.

    Raises:
        BindError: which parameters, and what to do.
    """
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
    """Refuse a sharded model whose gradients fully_shard sums in another format than the policy's `reduce`.

    Args:
        model: as the user gave it.
        policy: resolved, one that `reduces_itself`.
        asked: the field that is not carried out, for the message.

    Raises:
        UnbuiltError: it does, or gradients of low parameters are to be accumulated in fp32.
    """
    groups = list(_groups(model))
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
