"""Sharded tensors (DTensor), of which every rank has a part: `fully_shard` and tensor parallelism make them.

The kernels take plain tensors. What the library stores beside a sharded parameter is plain too, in the shape of this
rank's part; what it shows to users (fp32 values, optimizer states) is sharded as the parameter is.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import FormatError
from halfstep.formats import widest_dtype
from halfstep.torch_private.distributed import local_of, set_local
from halfstep.torch_private.foreach import foreach_copy_, foreach_mul_


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


# ------------------------------------------------------------------ norms that are equal on every rank


def sharded_norms(tensors: Sequence[Tensor], plain: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, those of sharded ones over all ranks; collective: one reduction on one mesh.

    Each rank adds the squares of what it has. Elements that several ranks have count in equal shares: replicas of a
    part, and plain tensors, which every rank has for itself. So what is not finite on one rank is not finite on all.
    Squares are added in fp64, where no fp32 norm overflows. `plain` returns the norms of tensors without DTensors.
    """
    keys = [(t.device_mesh, t.placements) if is_sharded(t) else None for t in tensors]  # type: ignore[attr-defined]
    mesh, around = _widest(tuple(dict.fromkeys(key[0] for key in keys if key is not None)))
    parts = [local(t) for t in tensors]
    some = [i for i, part in enumerate(parts) if part.numel()]  # a rank has nothing of a tensor with fewer rows
    device = parts[0].device
    squares = torch.zeros(len(parts), dtype=widest_dtype(device), device=device)
    if some:  # by views: an index or a factor made of the host's numbers would be copied to the device, with a wait
        foreach_copy_([squares[i] for i in some], list(plain([parts[i] for i in some]).to(squares).unbind()))
    squares.square_()
    foreach_mul_(list(squares.unbind()), [1 / mesh.size() if key is None else _share(mesh, *key) for key in keys])
    for group in around:
        if device.type != mesh.device_type:  # parts are on the host, which a backend such as "cuda:nccl" may not reach
            reached = f"{device.type}:" in torch.distributed.get_backend_config(group)
            squares = squares.to(device if reached else mesh.device_type)
        torch.distributed.all_reduce(squares, group=group)
    return squares.sqrt_().float().to(device)


@lru_cache(maxsize=256)
def _share(widest: Any, mesh: Any, placements: tuple[Any, ...]) -> float:
    """Return what part of the squares of a tensor a rank of the mesh `widest` counts: 1 if no other rank has them."""
    parts = 1
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            parts *= mesh.size(dim)
    return parts / int(widest.size())


@lru_cache(maxsize=256)
def _widest(meshes: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Return the mesh whose ranks include those of all `meshes`, and the process groups over which to reduce on it."""
    ranks = [frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes]
    widest, mesh = max(zip(ranks, meshes, strict=True), key=lambda pair: len(pair[0]))
    if not all(some <= widest for some in ranks):
        raise FormatError(
            "the parameters of one optimizer are sharded over ranks that no mesh of theirs contains together: "
            f"{sorted(map(sorted, ranks))}; give each mesh an optimizer and a TrainStep of its own"
        )
    if mesh.size() == torch.distributed.get_world_size():
        return mesh, [None]  # one reduction over all processes
    return mesh, [mesh.get_group(dim) for dim in range(mesh.ndim)]
