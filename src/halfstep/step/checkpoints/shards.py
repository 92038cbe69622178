"""Shards: the tensors of a training step's state, written by the ranks that have them and read in any sharding.

Each rank writes the part of every DTensor that it has, by torch.distributed.checkpoint; of a tensor that all ranks
have, one writes it. `names.split` gives the flat names. Reading needs no communication: each rank reads the parts of
its own shards, wherever the boundaries were.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from halfstep.step.checkpoints.names import Names

__all__ = ["own_files", "read", "write", "write_later"]

# ---------------------------------------------------------------------- writing


def write(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Write `tensors` into `folder`; collective on `group`.

    Raises:
        CheckpointException: a rank could not write; on all of them alike.
    """
    save(tensors, storage_writer=FileSystemWriter(folder), process_group=group)


def write_later(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup) -> Future[Any]:
    """Copy `tensors` to the host and write the copies in a thread, as `write` does; return its future."""
    writer = FileSystemWriter(folder)
    future = async_save(tensors, storage_writer=writer, process_group=group)
    assert isinstance(future, Future)  # what torch returns unless it is given a stager that copies later
    return future


def own_files(folder: Path, rank: int) -> list[Path]:
    """Return the files that `write` has made on this rank."""
    return [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]


# ---------------------------------------------------------------------- reading


def read(
    folder: Path, have: Mapping[str, Any], optimizer: Optimizer, names: Names, rests: Sequence[Any], rank: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return states of a model and an optimizer in the sharding of those that are here; nothing of them is changed.

    Args:
        folder: what `write` has written.
        have: the model's state now.
        optimizer: whose state to make.
        names: of its parameters.
        rests: what `split` returned besides tensors, of one rank or of all that had other parameters.
        rank: whose buffers to read; None: those that one of the ranks wrote for all.
    """
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted: dict[str, Tensor] = {}
    model: dict[str, Any] = {}
    for name, value in have.items():
        own = f"ranks/{rank}/{name}"
        saved = own if own in known else f"model/{name}"
        if isinstance(value, Tensor) and saved in known:
            model[name] = wanted[saved] = _empty(known[saved], value)
        for rest in rests:
            if name in rest["model"]:
                model[name] = rest["model"][name]
    if len(rests) == 1:  # else a rank has a part of the model, and other parts are none of its own
        unknown = {flat.partition("/")[2] for flat in known if flat.startswith("model/")} - set(have)
        model.update({name: torch.empty(0) for name in sorted(unknown)})
    entries = _entries(known, optimizer, names, wanted)
    for rest in rests:
        for name, other in rest["other"].items():
            entries.setdefault(name, {}).update(other)
    state, groups, number = {}, [], 0
    for own_names, options in zip(names, rests[0]["groups"], strict=True):
        numbers = list(range(number, number + len(own_names)))
        state.update({n: entries[name] for n, name in zip(numbers, own_names, strict=True) if name in entries})
        groups.append({**options, "params": numbers})
        number += len(own_names)
    if mismatched := [flat for flat, tensor in wanted.items() if tensor.is_meta]:
        for flat in mismatched:  # of another shape: the checks of the state name it
            del wanted[flat]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(wanted, storage_reader=FileSystemReader(folder), no_dist=True)
    return model, {"state": state, "param_groups": groups}


def _entries(
    known: Mapping[str, Any], optimizer: Optimizer, names: Names, wanted: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return tensors for the saved states of the optimizer's parameters, by name, and add them to `wanted`."""
    parameters = {
        name: parameter
        for group, own in zip(optimizer.param_groups, names, strict=True)
        for name, parameter in zip(own, group["params"], strict=True)
    }
    entries: dict[str, dict[str, Any]] = {}
    for flat, saved in known.items():
        kind, _, rest = flat.partition("/")
        name, _, key = rest.rpartition("/")
        if kind == "optimizer" and name in parameters:
            parameter = parameters[name]
            like = parameter if tuple(saved.size) == tuple(parameter.shape) else torch.empty(saved.size)
            entries.setdefault(name, {})[key] = wanted[flat] = _empty(saved, like)
    return entries


def _empty(saved: Any, like: Tensor) -> Tensor:
    """Return an empty tensor in the sharding of `like`, or one without memory if it was saved in another shape."""
    if tuple(saved.size) != tuple(like.shape):
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
    return torch.empty_like(like.detach(), dtype=saved.properties.dtype)
