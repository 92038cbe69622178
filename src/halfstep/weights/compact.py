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

    def _value(self, key: int) -> nn.Parameter:
        living = self._living.get(key)
        wide = self._wide(key) if living is None else living.detach().clone()
        return nn.Parameter(wide, requires_grad=self._parameters[key].requires_grad)

    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 value of `parameter` as a new tensor."""
        return self.value(parameter).detach()

    def _wide(self, key: int) -> Tensor:
        """Return the fp32 value that is stored."""
        parameter = self._parameters[key]
        return sharded_like(parameter, self._unpack(key, local(Tensor.detach(parameter))))

    def kept(self) -> Iterator[Tensor]:
        """Iterate over the second parts."""
        return iter(self._seconds.values())

    def temporaries(self) -> Iterator[Tensor]:
        """Iterate over the masters that are referenced."""
        return iter(list(self._living.values()))

    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        return self._pack(key, local(Tensor.detach(parameter)).float(), stepped=False)

    def _parts(self, key: int) -> tuple[Tensor, Tensor | None]:
        return local(Tensor.detach(self._parameters[key])), self._seconds.get(key)

    def _master(self, key: int) -> nn.Parameter:
        living = self._living.get(key)
        if living is None:
            living = self._living[key] = nn.Parameter(self._wide(key))
        return living

    @torch.no_grad()
    def settle(self) -> None:
        """Set fp32 values that are still referenced, though they exist for a step only, to those that are stored.

        An exception that is kept refers to those of the step that it ended, and some optimizers refer to them always.
        """
        for key, living in [] if self.editing or self.substituted else list(self._living.items()):
            local(living).copy_(local(self._wide(key)))

    def _read_low(self, key: int) -> None:
        if key in self._seconds:
            self._seconds[key].zero_()
        living = self._living.get(key)
        if living is not None:
            local(living).copy_(local(Tensor.detach(self._parameters[key])))

    def _write_low(self, keys: list[int], *, stepped: bool) -> list[int]:
        written = []
        for key in keys:
            living = self._living.get(key)
            if living is not None:  # else it cannot have changed
                local(Tensor.detach(self._parameters[key])).copy_(
                    self._pack(key, local(living.detach()), stepped=stepped)
                )
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
