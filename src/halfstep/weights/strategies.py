"""The weight strategies: what is stored behind a low parameter, and how an fp32 value becomes that.

Under all but `master` fp32 values exist only during a step, an edit or a load: 4 more bytes a parameter for them and 4
for their gradients, freed when it ends. During the update `split` and `kahan` need 2 bytes more than `master`,
otherwise 2 less (`stochastic` as many, and 4 less), in particular when activations are at their peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import WeightsError
from halfstep.kernels.eager.low import join_bf16, split_bf16
from halfstep.kernels.reference.operators import WEIGHT, split_kahan, stochastic_bf16
from halfstep.kernels.sharded import local, shard_of, sharded_like
from halfstep.torch_private.foreach import foreach_copy_
from halfstep.weights.draws import Draws
from halfstep.weights.ranks import replicated
from halfstep.weights.store import WeightStore


class MasterWeights(WeightStore):
    """fp32 masters behind low parameters; low weights are their masters, rounded half to even.

    Bytes per parameter: 2 (low) + 4 (master), and 4 more during the step for the fp32 gradient (see `attachment`).
    """

    name, form = "master", "copy"
    keeps_masters = True

    def _value(self, key: int) -> nn.Parameter:
        return self._masters[key]

    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        wide = local(Tensor.detach(parameter)).float().clone()
        self._masters[key] = nn.Parameter(sharded_like(parameter, wide), requires_grad=parameter.requires_grad)
        return wide.to(self.dtype)

    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        return local(self._masters[key]), local(Tensor.detach(self._parameters[key]))

    def _read_low(self, key: int) -> None:
        if key in self._fresh and replicated():  # a broadcast: only the low weights are equal on all ranks
            local(self._masters[key]).copy_(local(self._parameters[key]))
        else:
            self._read_unseen(key)

    def _read_unseen(self, key: int) -> None:
        master, low = local(self._masters[key]), local(Tensor.detach(self._parameters[key]))
        # where the low weight still is the rounded master, the master stays
        master.copy_(torch.where(master.to(self.dtype) == low, master, low.float()))

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        low = [local(self._parameters[k]) for k in keys]
        foreach_copy_(low, [local(self._masters[k]) for k in keys])
        return keys


class SplitWeights(WeightStore):
    """bf16 weights of the model, and the 16 bits of each fp32 pattern that bf16 drops; together the fp32 value.

    Bytes per parameter: 2 (low) + 2 (remainder). Nothing is lost: training is that of `master` bit for bit, but for low
    weights exactly half way between two bf16 numbers, which round up here (in magnitude) and to even there (see
    `kernels.reference.split_bf16`).
    """

    name, form = "split", "split"

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype, **options: Any) -> None:
        if low is not torch.bfloat16:
            raise WeightsError(
                f"master='split' is for bfloat16, whose numbers are upper halves of fp32 ones, and the low format is "
                f"{low}; use master='master' or 'kahan'"
            )
        super().__init__(named, low, **options)

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        low, rest = split_bf16(wide)
        self._keep(key, rest)
        return low

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return join_bf16(low, self._seconds[key])


class KahanWeights(WeightStore):
    """Low weights and, in the same low format, what rounding took from them, after Kahan's summation.

    Bytes per parameter: 2 (low) + 2 (compensation). The value is the exact sum of both: in bf16 at least 16 significant
    bits, so an update below half an ulp of the weight is kept until it counts, down to 2^-16 of the weight. In fp16 it
    is 22 bits or 2^-25, whichever is coarser: fp16 has no smaller compensations; and a weight that rounds to inf stays
    inf.
    """

    name, form = "kahan", "kahan"

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        low, rest = split_kahan(wide, self.dtype)
        self._keep(key, rest)
        return low

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return low.float() + self._seconds[key].float()


class StochasticWeights(WeightStore):
    """Low weights and nothing else; an update below half an ulp changes a weight with a probability.

    Bytes per parameter: 2 (low). After a step the new fp32 value is rounded to one of its two neighbours, the nearer
    the likelier, so that the mean over many steps is the value. Values set by hand or loaded round to nearest.
    """

    name, form = "stochastic", "stochastic"
    keeps_more = False
    draws: Draws

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype, **options: Any) -> None:
        self.draws = Draws()
        super().__init__(named, low, **options)

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


STRATEGIES: Mapping[str, type[WeightStore]] = MappingProxyType(
    {kind.name: kind for kind in (MasterWeights, SplitWeights, KahanWeights, StochasticWeights)}
)
"""Value of `Policy.master` -> what keeps the precise weights."""
