"""stochastic: a low weight and nothing else; an update below half an ulp changes it with a probability.

Bytes per parameter: 2 (low); for the peak of a step see `compact`. After a step the new fp32 value is rounded to one of
its two neighbours, the nearer the likelier, so that the mean over many steps is the value. Only steps round by chance:
values set by hand or loaded round to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.kernels.reference.operators import WEIGHT, stochastic_bf16
from halfstep.kernels.sharded import shard_of
from halfstep.weights.compact import CompactWeights
from halfstep.weights.draws import Draws


class StochasticWeights(CompactWeights):
    """Low weights that steps round stochastically."""

    name, form = "stochastic", "stochastic"
    keeps_more = False
    draws: Draws

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype) -> None:
        self.draws = Draws()
        super().__init__(named, low)

    def state(self) -> dict[str, Any]:
        """Return the seed and the count of updates on each device."""
        return self.draws.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with the bits that come after `state`."""
        self.draws.load_state(state)

    def cannot_update(self) -> str:
        """Return why an update in one pass cannot be made; "" if it can."""
        if self.dtype is not torch.bfloat16:
            return "only bf16 weights are rounded stochastically in one pass"
        return super().cannot_update()

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        self._places = {key: i for i, key in enumerate(keys)}  # decide which bits a parameter gets
        written = super()._write_low(keys, stepped=stepped)
        for device in {self._parameters[key].device for key in written} if stepped and not self.draws.shared else ():
            self.draws.advance(device)
        return written

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        if not stepped:
            return wide.to(self.dtype)
        bits = self.draws.bits(self._places[key], WEIGHT, wide, shard_of(self._parameters[key]))
        return stochastic_bf16(wide, bits) if self.dtype is torch.bfloat16 else _stochastic_fp16(wide, bits)

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return low.float()


def _stochastic_fp16(wide: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to fp16, down or up by `bits`; what is not finite stays."""
    exponent = (torch.frexp(wide).exponent - 1).clamp(min=-14)
    spacing = torch.ldexp(torch.ones_like(wide), exponent - 10)
    steps = (wide / spacing).abs()  # every operation here is exact, in fp32
    below, chance = steps.floor(), bits / 65536
    rest = steps - below
    steps = torch.where(wide < 0, 0 - (below + (rest > chance)), below + (rest >= 1 - chance))
    rounded = steps * spacing
    return torch.where(torch.isfinite(wide), rounded, wide).half()
