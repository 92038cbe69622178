"""Shards: the tensors of a training step's state, written by the ranks that have them and read in any sharding.

Each rank writes the part of every DTensor that it has, by torch.distributed.checkpoint; of a tensor that all ranks
have, one writes it. `names.split` gives the flat names. Reading needs no communication: each rank reads the parts of
its own shards, wherever the boundaries were, by a table that rank 0 keeps in its own file of the checkpoint.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from halfstep.arguments import whole
from halfstep.checkpoints.files import FILE, refusal
from halfstep.checkpoints.names import Names, chunk_of, split
from halfstep.errors import CheckpointError, first_line, lacks_memory
from halfstep.kernels.sharded import is_sharded
from halfstep.schema import Each, regular

Table = dict[str, dict[str, Any]]
"""Flat name of a tensor -> its dtype, its size, and its parts: where each lies in the tensor and in which file."""

PART = {"at": [whole(), ...], "size": [whole(), ...], "file": FILE, "offset": whole(), "length": whole()}
TABLE = Each(str, {"dtype": torch.dtype, "size": [whole(), ...], "parts": [PART, ...]})


class Writer(FileSystemWriter):
    """The files of torch.distributed.checkpoint in `folder`, and on rank 0 what stands in them: `table`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.table: Table = {}

    def finish(self, metadata: Any, results: Any) -> None:
        """Write ``.metadata``, a pickle for other programs that is not read here, and make the table."""
        super().finish(metadata, results)
        places = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for some in results for r in some}
        for name, tensor in metadata.state_dict_metadata.items():
            parts = []
            for chunk in tensor.chunks:
                place = places[name, tuple(chunk.offsets)]
                where = {"file": place.relative_path, "offset": place.offset, "length": place.length}
                parts.append({"at": list(chunk.offsets), "size": list(chunk.sizes), **where})
            self.table[name] = {"dtype": tensor.properties.dtype, "size": list(tensor.size), "parts": parts}

    def write(self, tensors: dict[str, Tensor], group: dist.ProcessGroup, *, wait: bool) -> Callable[[], object]:
        """Return what writes `tensors`; collective on `group`: if a rank could not, CheckpointException on all of them.

        With ``wait=False`` they are copied to the host now, and a thread writes the copies, for which it waits.
        """
        if wait:
            return partial(save, tensors, storage_writer=self, process_group=group)
        future = async_save(tensors, storage_writer=self, process_group=group)
        assert isinstance(future, Future)  # what torch returns unless it is given a stager that copies later
        return future.result


def own_files(folder: Path, rank: int) -> list[Path]:
    """Return the files that `write` has made on this rank."""
    return [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]


def of_whole(state: Mapping[str, Any], model: nn.Module, names: Names) -> dict[str, Any]:
    """Return what `read` takes of a state that was saved whole: each tensor is the one part of itself."""
    tensors, rest = split(state, model, names, 0)
    table = {}
    for name, tensor in tensors.items():
        size = list(tensor.shape)
        part = {"at": [0] * len(size), "size": size, "tensor": tensor}
        table[name] = {"dtype": tensor.dtype, "size": size, "parts": [part]}
    return {"shards": table, "rests": [rest]}


def read(
    folder: Path, content: Any, have: Mapping[str, Any], optimizer: Optimizer, names: Names, rank: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return states of a model and an optimizer in the sharding of those that are here; nothing of them is changed.

    `content` has the table of the `Writer` as "shards", and as "rests" what `split` returned besides tensors, of one
    rank or of all that had other parameters. `have` is the model's state now, `names` those of the optimizer's
    parameters. Buffers are those of `rank`; None: those that one of the ranks wrote for all.
    """
    known, rests = content["shards"], content["rests"]
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
        model.update({name: torch.empty(0, device="cpu") for name in sorted(unknown)})
    entries = _entries(known, optimizer, names, wanted)
    for rest in rests:
        for name, other in rest["other"].items():
            entries.setdefault(name, {}).update(other)
    every = {name for group in names for name in group}
    state: dict[Any, Any] = {name: entry for name, entry in entries.items() if name not in every}
    groups, number = [], 0
    for own_names, options in zip(names, rests[0]["groups"], strict=True):
        numbers = list(range(number, number + len(own_names)))
        state.update({n: entries[name] for n, name in zip(numbers, own_names, strict=True) if name in entries})
        groups.append({**options, "params": numbers})
        number += len(own_names)
    for flat, tensor in wanted.items():
        if not tensor.is_meta:  # else of another shape: the checks of the state name it
            _fill(tensor, known[flat], folder, flat)
    return model, {**rests[0].get("more", {}), "state": state, "param_groups": groups}


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
            like = parameters[name]
            if tuple(saved["size"]) != tuple(like.shape):
                like = torch.empty(saved["size"], device="cpu")
            entries.setdefault(name, {})[key] = wanted[flat] = _empty(saved, like)
    return entries


def _empty(saved: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return an empty tensor in the sharding of `like`, or one without memory if it was saved in another shape."""
    if tuple(saved["size"]) != tuple(like.shape):
        return torch.empty(saved["size"], dtype=saved["dtype"], device="meta")
    return torch.empty_like(like.detach(), dtype=saved["dtype"], device=None if is_sharded(like) else "cpu")


def check_parts(known: Table, folder: Path) -> None:
    """Check that no tensor of a table is larger than the parts that it is read from, and these than their files."""
    sizes: dict[str, int] = {}
    for flat, saved in known.items():
        for part in saved["parts"]:
            if part["file"] not in sizes:
                sizes[part["file"]] = regular(folder / part["file"], CheckpointError)
            ends = list(zip(part["at"], part["size"], saved["size"], strict=False))
            inside = len(part["at"]) == len(part["size"]) == len(saved["size"]) == len(ends)
            inside = inside and all(at + size <= end for at, size, end in ends)
            if not inside or part["offset"] + part["length"] > sizes[part["file"]]:
                raise refusal(folder, f"a part of {flat!r} lies outside of it, or of its file")
        if math.prod(saved["size"]) * saved["dtype"].itemsize > sum(part["length"] for part in saved["parts"]):
            raise refusal(folder, f"the parts of {flat!r} are smaller than its size {saved['size']}")


def _fill(tensor: Tensor, saved: Mapping[str, Any], folder: Path, flat: str) -> None:
    """Read into `tensor`, or into the part of it that this rank has, what of the saved parts lies there."""
    inside, own = chunk_of(tensor)
    found: list[list[range]] = []
    for part in saved["parts"]:
        there = [range(at, at + size) for at, size in zip(part["at"], part["size"], strict=True)]
        both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(there, inside, strict=True)]
        if not all(both):
            continue
        content = _part(folder, part, flat)
        if list(content.shape) != part["size"] or content.dtype != saved["dtype"]:
            raise refusal(folder, f"a part of {flat!r} is not what its table says")
        own[_within(both, inside)].copy_(content[_within(both, there)])
        found.append(both)
    whole_of_it = sum(math.prod(map(len, one)) for one in found) == own.numel()
    if not whole_of_it or any(all(map(_meet, one, other)) for one, other in combinations(found, 2)):
        raise refusal(folder, f"the parts of {flat!r} do not make up the whole of it")


def _part(folder: Path, part: Mapping[str, Any], flat: str) -> Tensor:
    if isinstance(saved := part.get("tensor"), Tensor):
        return saved
    try:
        with (folder / part["file"]).open("rb") as file:
            file.seek(part["offset"])
            content = torch.load(io.BytesIO(file.read(part["length"])), weights_only=True, map_location="cpu")
        assert isinstance(content, Tensor)
    except Exception as error:
        if lacks_memory(error):
            raise
        raise refusal(folder, f"{flat!r} cannot be read ({type(error).__name__}: {first_line(error)})") from error
    return content


def _within(both: Sequence[range], outer: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(both, outer, strict=True))


def _meet(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
