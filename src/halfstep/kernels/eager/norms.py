"""Norms by torch's multi-tensor operators (`_foreach`), and of sharded tensors (DTensor), equal on every rank.

On CPU `_foreach_norm` runs one loop a tensor, and its bf16 and fp16 loops convert element by element: over 21M elements
on two cores of an AMD EPYC with avx512_bf16 they took 21 ms against 2.4 ms in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["norms", "sharded_norms"]


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, accumulated in fp32: `reference.norms` for dense real tensors of one device.

    Args:
        tensors: dense, floating, all on one device; at least one. DTensors give a DTensor.

    Returns:
        (len(tensors),) fp32.
    """
    return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=torch.float32))


def sharded_norms(tensors: Sequence[Tensor], plain: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, accumulated in fp32; collective over the meshes of those that are sharded.

    A plain tensor beside sharded ones is one that each rank has for itself, equal on all: its norm counts once. Where
    it is not finite on one rank only, its norm becomes nan on the others, so that all come to the same verdict.

    Args:
        tensors: any that `reference.norms` takes, and dense floating DTensors, of which there is at least one.
        plain: returns the norms of tensors without DTensors.

    Returns:
        (len(tensors),) fp32 on the device of the first tensor.
    """
    groups: dict[Hashable, list[int]] = {}
    meshes: dict[Any, None] = {}
    for i, tensor in enumerate(tensors):
        mesh = getattr(tensor, "device_mesh", None)
        groups.setdefault(None if mesh is None else (mesh, tensor.placements), []).append(i)  # type: ignore[attr-defined]
        if mesh is not None:
            meshes[mesh] = None
    device = tensors[0].device
    found = torch.empty(len(tensors), dtype=torch.float32, device=device)
    for key, places in groups.items():
        members = [tensors[i] for i in places]
        if key is None:
            mine = plain(members)
            for mesh in meshes:
                mine = _agreed(mine, mesh)
        else:
            mine = _whole(members)
        found[torch.tensor(places, device=device)] = mine.to(device)
    return found


def _whole(members: list[Tensor]) -> Tensor:
    """Return the norms of DTensors of one mesh and one list of placements."""
    if all(t.numel() for t in members):
        found: Any = norms(members)
    else:
        found = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in members])
    whole: Tensor = found.full_tensor()
    return whole


def _agreed(norms: Tensor, mesh: Any) -> Tensor:
    """Return `norms`, nan where another rank of `mesh` has one that is not finite."""
    from torch.distributed.tensor import DTensor, Partial

    finite = norms.isfinite()
    bad: Any = DTensor.from_local(finite.logical_not().float(), mesh, [Partial()] * mesh.ndim, run_check=False)
    return torch.where(finite & (bad.full_tensor() > 0), torch.full_like(norms, float("nan")), norms)
