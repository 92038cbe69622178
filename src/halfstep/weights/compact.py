"""Strategies whose fp32 values exist only during a step, an edit or a load.

Between steps a parameter has its low weight and, in some strategies, a second part of 16 bits. For a step the fp32
value is computed from them, the optimizer steps it, and it is packed again. So a step needs 4 more bytes a parameter
for these values and 4 for their gradients, freed when it ends. During the update `split` and `kahan` need 2 bytes more
than `master`, otherwise 2 less (`stochastic` as many, and 4 less), in particular when activations are at their peak.

After a manual write into a low weight (note [changes by hand] in `store`) the second part of the whole parameter
becomes zero, because the written elements are unknown.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from halfstep.kernels.sharded import local, sharded_like
from halfstep.weights.store import WeightStore

__all__ = ["CompactWeights"]


class CompactWeights(WeightStore):
    """fp32 values behind low parameters, computed on request."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype) -> None:
        self._seconds: dict[int, Tensor] = {}  # what is kept beside a low weight
        self._living = weakref.WeakValueDictionary[int, nn.Parameter]()  # masters that are referenced at the moment
        super().__init__(named, low)

    @abstractmethod
    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        """Keep what belongs beside the low weight and return that: packing what `_unpack` gave changes nothing."""

    @abstractmethod
    def _unpack(self, key: int, low: Tensor) -> Tensor:
        """Return the fp32 value: a new tensor, in the memory layout of `low`, as fused optimizers require."""

    def _keep(self, key: int, part: Tensor) -> None:
        """Keep `part` beside the low weight, in the memory of the one before: CUDA graphs have captured its address."""
        known = self._seconds.get(key)
        if known is None or known.shape != part.shape or known.device != part.device:
            self._seconds[key] = part
        else:
            known.copy_(part)

    def value(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a copy of the fp32 value."""
        return nn.Parameter(self.read(parameter), requires_grad=parameter.requires_grad)

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 value of `parameter` as a new tensor."""
        if self.is_frozen(parameter):
            return super().read(parameter)
        key = self._key(parameter)
        living = self._living.get(key)
        if living is not None:
            return living.detach().clone()
        return sharded_like(parameter, self._unpack(key, local(parameter.detach())))

    def kept(self) -> Iterator[Tensor]:
        """Iterate over the second parts."""
        return iter(self._seconds.values())

    def temporaries(self) -> Iterator[Tensor]:
        """Iterate over the masters that are referenced."""
        return iter(list(self._living.values()))

    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        return self._pack(key, local(parameter.detach()).float(), stepped=False)

    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        return local(self._parameters[key]), self._seconds.get(key)

    def _master(self, key: int) -> nn.Parameter:
        living = self._living.get(key)
        if living is None:
            parameter = self._parameters[key]
            wide = sharded_like(parameter, self._unpack(key, local(parameter.detach())))
            living = self._living[key] = nn.Parameter(wide)
        return living

    def _read_low(self, key: int) -> None:
        if key in self._seconds:
            self._seconds[key].zero_()
        living = self._living.get(key)
        if living is not None:
            local(living).copy_(local(self._parameters[key]))

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        written = []
        for key in keys:
            living = self._living.get(key)
            if living is not None:  # else it cannot have changed
                local(self._parameters[key]).copy_(self._pack(key, local(living.detach()), stepped=stepped))
                written.append(key)
        return written

    def _move(self, key: int, like: Tensor) -> None:
        if key in self._seconds:
            self._seconds[key] = torch.empty_like(like, dtype=self._seconds[key].dtype).copy_(self._seconds[key])
        if (living := self._living.get(key)) is not None:
            living.data = torch.empty_like(like, dtype=torch.float32).copy_(living.detach())

    def _forget(self, key: int) -> None:
        self._seconds.pop(key, None)
        self._living.pop(key, None)
