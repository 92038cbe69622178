"""kahan: a low weight and, in the same low format, what rounding took from it.

Bytes per parameter: 2 (low) + 2 (compensation); for the peak of a step see `compact`. The value is the exact sum of
both: in bf16 at least 16 significant bits, so an update below half an ulp of the weight is kept until it counts, down
to 2^-16 of the weight. In fp16 it is 22 bits or 2^-25, whichever is coarser: fp16 has no smaller compensations; and a
weight that rounds to inf stays inf.
"""

from __future__ import annotations

from torch import Tensor

from halfstep.weights.compact import CompactWeights


class KahanWeights(CompactWeights):
    """Low weights with compensations beside them, after Kahan's summation."""

    name, form = "kahan", "kahan"

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        low, rest = self._nearest(wide)
        # a rest that was itself rounded up to half an ulp is a tie, which may belong to the other neighbour: settle
        # that here, so that packing the sum again gives the same two numbers
        low, rest = self._nearest(low.float() + rest.float())
        self._keep(key, rest)
        return low

    def _nearest(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        low = wide.to(self.dtype)
        rest = wide - low.float()
        return low, rest.nan_to_num_(0.0, 0.0, 0.0).to(self.dtype)  # not finite only where the low weight is not

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return low.float() + self._seconds[key].float()
