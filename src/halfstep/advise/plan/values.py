"""Values: what small tensors hold that follow from the batch and from constants alone: masks, positions, lengths.

Fake tensors have no values, and models read some: whether a mask has padding, how long the longest sequence is. The
batch of a plan is real, so these are computed beside the trace, on the CPU. Whatever depends on weights, on random
numbers or on large floating inputs has no value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.torch_private.devices import storage_key
from halfstep.torch_private.fake import FakeTensor, unset_fake_temporarily
from halfstep.torch_private.operators import schema_of
from halfstep.torch_private.trees import tree_map_only
from halfstep.trees import tensors

LARGEST = 1 << 22  # elements of integers
LARGEST_FLOAT = 1 << 12  # elements of floating tensors: lengths and counts, no pictures
NAME = "_halfstep_value"  # attribute of a fake tensor; goes with it


class Values:
    """Values of fake tensors, computed beside them."""

    def __init__(self) -> None:
        self._lost: set[int] = set()  # storages of values that were overwritten by unknown ones

    def give(self, tensor: Tensor, value: Tensor) -> None:
        """Note what a fake tensor holds."""
        if value.numel() <= (LARGEST_FLOAT if value.is_floating_point() or value.is_complex() else LARGEST):
            setattr(tensor, NAME, value)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor holds, None if it is unknown."""
        if type(tensor) is not FakeTensor:
            return tensor
        value: Tensor | None = getattr(tensor, NAME, None)
        return None if value is None or storage_key(value.untyped_storage()) in self._lost else value

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on values; None if one is unknown or the result is random."""
        unknown = any(self.of(tensor) is None for tensor in tensors([args, *kwargs.values()]))
        if unknown or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        except Exception:  # what a CPU does not do: unknown, and an error only if it is read
            return None

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the results of an operator that ran on fake tensors their values, if they have any."""
        if isinstance(result, Tensor):
            large = result.numel() > (LARGEST if not result.is_floating_point() else LARGEST_FLOAT)
            changed = schema_of(func).is_mutable
            if large and not changed:
                return
            value = self.compute(func, args, kwargs)
            if isinstance(value, Tensor):
                self.give(result, value)
            elif changed and (old := getattr(result, NAME, None)) is not None:
                self._lost.add(storage_key(old.untyped_storage()))  # of all tensors that share its memory
        elif isinstance(result, (tuple, list)) and all(isinstance(t, Tensor) for t in result):
            if sum(t.numel() for t in result) <= LARGEST_FLOAT or not any(t.is_floating_point() for t in result):
                for tensor, value in zip(result, self.compute(func, args, kwargs) or (), strict=False):
                    self.give(tensor, value)

    def dense_index(self, args: Any) -> Any:
        """Return arguments of `aten::index` with masks of known values as lists of places; None if one is unknown."""
        places: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            value = self.of(index)
            if value is None:
                return None
            with unset_fake_temporarily():
                found = value.nonzero().unbind(1)
            places += [torch.empty(len(rows), dtype=torch.int64, device=index.device) for rows in found]
        return args[0], places
