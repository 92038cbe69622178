"""Batches: their size, and the same batch with another one. In and out: arguments of a loss function, nested or not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep.advise.plan.memory import PlanError
from halfstep.torch_private.trees import tree_leaves, tree_map_only

__all__ = ["batch_size", "with_size"]

LARGEST = 1 << 22  # elements of a tensor whose values are kept: models read those of masks and lengths


def batch_size(batch: Any) -> int:
    """Return the first dimension of the first tensor that has one; 0 without such a tensor."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def with_size(batch: Any, size: int) -> Any:
    """Return `batch` with `size` in the place of its size, in every tensor whose first dimension it is.

    Rows are repeated; a large tensor is on the meta device.

    Raises:
        PlanError: it has no size, or `size` is none.
    """
    old = batch_size(batch)
    if not old:
        raise PlanError(
            f"the batch cannot be given size {size}: none of its tensors has a dimension; give a batch of it"
        )
    if size < 1:
        raise PlanError(f"a batch has 1 sample or more, not {size}")

    def sized(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != old:
            return tensor
        shape = (size, *tensor.shape[1:])
        if tensor.is_meta or math.prod(shape) > LARGEST:
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(size) % old]

    return tree_map_only(Tensor, sized, batch)
