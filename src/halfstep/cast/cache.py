"""Low copies of fp32 weights, each made once per region.

torch's own cache is keyed by the tensor alone, so it returns a stale copy after an in-place update and the wrong format
where regions of two formats nest. Here the key is tensor, version and format; the cache belongs to one thread and ends
with its outermost region.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WeightCasts"]


class WeightCasts:
    """The casts of one thread: (weight, version, format) -> low tensor with its autograd edge to the weight."""

    __slots__ = ("_casts",)

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` in `dtype`, from the cache if this very value was cast before.

        The cast is recorded by autograd even under `torch.no_grad`, so that a later use with gradients finds its edge.
        """
        key = (id(weight), dtype)
        known = self._casts.get(key)
        if known is not None and known[0] is weight and known[1] == weight._version:
            return known[2]
        if torch.is_inference_mode_enabled():  # the copy could not be used outside inference mode
            return weight.to(dtype)
        with torch.enable_grad():
            low = weight.to(dtype)
        self._casts[key] = (weight, weight._version, low)
        return low

    def clear(self) -> None:
        """Forget every cast."""
        self._casts.clear()
