"""Weights of micro-batches: a window is divided by what its loss functions say they have summed over, such as tokens.

Note [reference]: micro-batch i, the mean of whose loss has the gradient m_i, has the weight w_i. The gradient of a
window is the sum of w_i m_i over micro-batches and ranks, divided by the sum of w_i. A backward pass knows its own w_i
only, so it begins from ``w_i / reference``, and the update divides by the sum over `reference`. This is a power of two
near the first weight of the run, so gradients have the magnitude of means, and no bit depends on it.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.binding.fsdp import is_distributed
from halfstep.errors import StepError
from halfstep.step.arguments import Given
from halfstep.step.part import Part
from halfstep.step.parts.ranks import OneRank
from halfstep.step.parts.record import Record


class Weights(Part):
    """Weighs the micro-batches of windows whose loss function returns an `hs.Loss`."""

    def __init__(self, given: Given, record: Record, ranks: OneRank) -> None:
        self._given, self._record, self._ranks = given, record, ranks
        self._group = ranks.group if ranks.group is not None or not is_distributed(given.model) else dist.group.WORLD
        self.reference: float | None = None

    def begin_window(self) -> None:
        """Forget the weights of the last window."""
        self._record.weighed = self._record.share = None

    def seed(self, seed: Tensor) -> Tensor:
        """Return `seed` times the weight of the micro-batch."""
        record = self._record
        if record.micro_batches and (record.weight is None) is not (record.weighed is None):
            this, before = ("no", "an") if record.weight is None else ("an", "no")
            raise StepError(
                f"micro-batch {record.micro_batches + 1} of a window returned {this} hs.Loss, and the one before it "
                f"{before}; return hs.Loss(sum, weight) from all of them"
            )
        if record.weight is None:
            return seed
        if self.reference is None:
            self.reference = self._near(record.weight)
        weight = record.weight / self.reference
        record.weighed = weight if record.weighed is None else record.weighed + weight
        return seed * weight.to(seed.dtype)

    def _near(self, weight: Tensor) -> float:
        """Return a power of two near `weight`, the same on all ranks; waits for the device, once in a run."""
        largest = torch.zeros_like(weight) if self._ranks.joining else weight.clone()
        if self._group is not None and not self._ranks.joining:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        size = float(largest)
        return 2.0 ** round(math.log2(size)) if 0.0 < size < math.inf else 1.0

    def before_update(self) -> None:
        """Say by what the gradients are to be divided beside the loss scale; `Ranks.agree` has where it is asked."""
        total = self._record.weighed
        ranks = self._ranks
        if total is None or (ranks.group is not None and (ranks.joining or not ranks.averaged)):
            return
        if self._group is not None:
            total = total / dist.get_world_size(self._group)
            dist.all_reduce(total, group=self._group)
        self._record.share = total / self._given.accumulate
