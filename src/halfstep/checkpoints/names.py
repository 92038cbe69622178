"""The state of a training step by the names of its parameters, so that it fits another order and another sharding."""

from collections.abc import Mapping
from typing import Any

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

    The flat names are ``model/NAME``, ``optimizer/NAME/STATE`` and ``ranks/RANK/NAME``: each rank may have its own
    buffers. `names` are those of the parameters of the saved optimizer.
    """
    found, optimizer = state["model"], state["optimizer"]
    if [len(group["params"]) for group in optimizer["param_groups"]] != [*map(len, names)]:
        raise CheckpointError("names: others than the parameters of the saved optimizer; nothing was loaded")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors: dict[str, Tensor] = {}
    more = {key: value for key, value in optimizer.items() if key not in {"state", "param_groups"}}
    rest: dict[str, Any] = {"model": {}, "groups": [], "names": names, "other": {}, "more": more}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            rest["model"][name] = value
            continue
        tensors[f"model/{name}"] = value
        if name not in parameters and not is_sharded(value):
            tensors[f"ranks/{rank}/{name}"] = value
    by_number: dict[Any, str] = {}
    for group, own in zip(optimizer["param_groups"], names, strict=True):
        by_number.update(zip(group["params"], own, strict=True))
        rest["groups"].append({key: value for key, value in group.items() if key != "params"})
    for number, entry in optimizer["state"].items():
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
