"""Low copies of fp32 weights, each made once per region, and of frozen weights once and for all.

torch's own cache is keyed by the tensor alone, so it returns a stale copy after an in-place update and the wrong format
where regions of two formats nest; and it never keeps a frozen weight, which is cast at every use. Here the key is
tensor, version and format. `WeightCasts` belongs to one thread and ends with its outermost region; `FrozenCasts`
belongs to the policy of prepared models and keeps a low copy as long as its weight lives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["FrozenCasts", "WeightCasts"]


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


class FrozenCasts:
    """Low copies of weights that require no gradient; 2 bytes a frozen parameter, for no cast in later steps."""

    __slots__ = ("_casts",)

    def __init__(self) -> None:
        self._casts = WeakTensorKeyDictionary()

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` in `dtype`, without autograd edge; made anew where the weight has changed since."""
        known = self._casts.get(weight)
        if known is not None and known[0] == weight._version and known[1].dtype is dtype:
            low: Tensor = known[1]
            return low
        if weight.is_inference():  # it has no version that would tell of a change
            return weight.to(dtype)
        with torch.inference_mode(False):  # a copy made in inference mode could not serve training later
            low = weight.detach().to(dtype)
        self._casts[weight] = (weight._version, low)
        return low
