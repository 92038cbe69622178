"""Sharded tensors (DTensor), of which every rank has a part: `fully_shard` and tensor parallelism make them.

The kernels take plain tensors. What the library stores beside a sharded parameter is plain too, in the shape of this
rank's part; what it shows to users (fp32 values, optimizer states) is sharded as the parameter is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.torch_private.distributed import local_of, set_local


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor."""
    return type(tensor) not in {Tensor, nn.Parameter} and hasattr(tensor, "placements")


def has_parts(model: nn.Module) -> bool:
    """Return whether a rank has only a part of some parameter of `model`."""
    return any(map(is_sharded, model.parameters()))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, without autograd, and any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    part: Any = local_of(tensor)  # `to_local` records autograd where that is on
    wait = getattr(part, "wait", None)  # the result of a collective that may still run
    found: Tensor = part if wait is None else wait()
    return found


def sharded_like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return `part`, which has the shape of this rank's part of `tensor`, sharded as `tensor` is."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    like: Any = tensor
    place = like.device_mesh, like.placements
    with torch.no_grad():
        whole: Tensor = DTensor.from_local(part, *place, run_check=False, shape=like.shape, stride=like.stride())
    return whole


def put(parameter: nn.Parameter, part: Tensor) -> None:
    """Give `parameter` other data, in any format: the whole of a plain one, this rank's part of a sharded one."""
    if not is_sharded(parameter):
        parameter.data = part
        return
    whole: Any = sharded_like(parameter, part)
    sharded: Any = parameter
    sharded.data = whole  # the format that torch reports; the two attributes hold what it computes with
    set_local(sharded, whole)


def split_of(tensor: Tensor) -> Any:
    """Return how `tensor` is split into parts, the same on every rank: (mesh, its dimensions), None if it is whole."""
    if not is_sharded(tensor):
        return None
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]  # type: ignore[attr-defined]
    return (tensor.device_mesh, *split) if split else None  # type: ignore[attr-defined]


def shard_of(tensor: Tensor) -> int:
    """Return which of the different parts of `tensor` this rank has; replicas of a part have the same number."""
    split = split_of(tensor)
    if split is None:
        return 0
    mesh, *dims = split
    found = 0
    for dim in dims:
        found = found * mesh.size(dim) + mesh.get_local_rank(dim)
    return int(found)
