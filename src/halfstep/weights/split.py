"""split: a bf16 weight and the 16 bits of the fp32 pattern that bf16 drops; together they are the fp32 value.

Bytes per parameter: 2 (low) + 2 (remainder); for the peak of a step see `compact`. Nothing is lost: training is that
of `master` bit for bit, but for low weights exactly half way between two bf16 numbers, which round up here (in
magnitude) and to even there (see `kernels.reference.split_bf16`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.kernels.eager.low import join_bf16, split_bf16
from halfstep.weights.compact import CompactWeights


class SplitWeights(CompactWeights):
    """fp32 values in two halves: bf16 weights of the model, and int16 remainders here."""

    name, form = "split", "split"
    low_dtypes = frozenset({torch.bfloat16})

    def _refusal(self, low: torch.dtype) -> str:
        return (
            f"master='split' is for bfloat16, whose numbers are upper halves of fp32 ones, and the low format is "
            f"{low}; use master='master' or 'kahan'"
        )

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        low, rest = split_bf16(wide)
        self._keep(key, rest)
        return low

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return join_bf16(low, self._seconds[key])
