"""master: an fp32 copy of every low parameter.

Bytes per parameter: 2 (low) + 4 (master), and 4 more during the step for the fp32 gradient (see `attachment`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from halfstep.kernels.sharded import local, sharded_like
from halfstep.torch_private.foreach import foreach_copy_
from halfstep.weights.ranks import replicated
from halfstep.weights.store import WeightStore


class MasterWeights(WeightStore):
    """fp32 masters behind low parameters; low weights are their masters, rounded half to even."""

    name, form = "master", "copy"
    keeps_buffers = True

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype) -> None:
        self._masters: dict[int, nn.Parameter] = {}
        super().__init__(named, low)

    def masters(self) -> Iterator[nn.Parameter]:
        """Iterate over the fp32 masters, in the order of `parameters`."""
        return iter(self._masters.values())

    def _value(self, key: int) -> nn.Parameter:
        return self._masters[key]

    def kept(self) -> Iterator[Tensor]:
        """Iterate over the masters."""
        return self.masters()

    def temporaries(self) -> Iterator[Tensor]:
        """Iterate over nothing: masters are always there."""
        return iter(())

    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        wide = local(Tensor.detach(parameter)).float().clone()
        self._masters[key] = nn.Parameter(sharded_like(parameter, wide), requires_grad=parameter.requires_grad)
        return wide.to(self.dtype)

    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        return local(self._masters[key]), local(Tensor.detach(self._parameters[key]))

    def _master(self, key: int) -> nn.Parameter:
        return self._masters[key]

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

    def _move(self, key: int, like: Tensor) -> None:
        master = self._masters[key]
        master.data = torch.empty_like(like, dtype=torch.float32).copy_(master.detach())

    def _forget(self, key: int) -> None:
        del self._masters[key]
