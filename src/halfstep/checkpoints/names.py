"""The state of a training step by the names of its parameters, so that it fits another order and another sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import CheckpointError
from halfstep.kernels.sharded import is_sharded

Names = list[list[str]]
"""Of the parameters of an optimizer, by group."""


def names_of(model: nn.Module, optimizer: Optimizer) -> Names:
    """Return the names of the optimizer's parameters; one that is not in `model` has its place for a name."""
    known = {id(p): name for name, p in model.named_parameters()}
    return [
        [known.get(id(p), f"?{i}.{j}") for j, p in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def split(state: Mapping[str, Any], model: nn.Module, names: Names, rank: int) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a state of a training step by flat names, and the rest of 'model' and 'optimizer'.

    The names are ``model/NAME``, ``optimizer/NAME/STATE`` and ``ranks/RANK/NAME``: each rank may have its own buffers.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {"model": {}, "groups": [], "names": names, "other": {}}
    for name, value in state["model"].items():
        if not isinstance(value, Tensor):
            rest["model"][name] = value
            continue
        tensors[f"model/{name}"] = value
        if name not in parameters and not is_sharded(value):
            tensors[f"ranks/{rank}/{name}"] = value
    by_number: dict[Any, str] = {}
    for group, own in zip(state["optimizer"]["param_groups"], names, strict=True):
        by_number.update(zip(group["params"], own, strict=True))
        rest["groups"].append({key: value for key, value in group.items() if key != "params"})
    for number, entry in state["optimizer"]["state"].items():
        name = by_number.get(number)
        if name is None:  # what the optimizer keeps for all parameters
            rest["other"][number] = entry
            continue
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            else:
                rest["other"].setdefault(name, {})[key] = value
    return tensors, rest


def sharded_as(full: Any, like: Any) -> Any:
    """Return a tensor in the sharding of `like`, each rank its own part; anything else is returned as it is."""
    if not is_sharded(like) or is_sharded(full) or not isinstance(full, Tensor) or full.shape != like.shape:
        return full
    out = torch.empty_like(like.detach(), dtype=full.dtype)
    places, own = chunk_of(out)
    own.copy_(full[tuple(slice(place.start, place.stop) for place in places)])
    return out


def chunk_of(tensor: Tensor) -> tuple[list[range], Tensor]:
    """Return which part of a tensor this rank has, by dimension, and the tensor that holds it."""
    if not is_sharded(tensor):
        return [range(size) for size in tensor.shape], tensor
    chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # of DTensor
    if len(chunks) != 1:
        raise CheckpointError(f"this rank has {len(chunks)} parts of one tensor, and one is supported")
    (chunk,) = chunks
    own: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # of DTensor
    return [range(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)], own


def reordered(state: Mapping[str, Any], saved: Names, names: Names) -> Mapping[str, Any]:
    """Return the state of an optimizer with its parameters in the order of `names`, which may not be the `saved` one.

    A state that fits no order is returned as it is: the checks of the state name what is wrong.
    """
    if saved == names or [sorted(group) for group in saved] != [sorted(group) for group in names]:
        return state
    groups = []
    if [len(group["params"]) for group in state["param_groups"]] != [len(group) for group in saved]:
        raise CheckpointError("names: others than the parameters of the saved optimizer; nothing was loaded")
    for group, old, new in zip(state["param_groups"], saved, names, strict=True):
        number = dict(zip(old, group["params"], strict=True))
        groups.append({**group, "params": [number[name] for name in new]})
    return {**state, "param_groups": groups}
