"""stochastic: a low weight and nothing else; an update below half an ulp moves it now and then, right on average.

Bytes per parameter: 2 (low); for the peak of a step see `compact`. After a step the new fp32 value is rounded to one of
its two neighbours, the nearer the likelier, so that the mean over many steps is the value. Only steps round by chance:
values set by hand or loaded round to nearest.

Note [seeds]: the bits come from a generator of the store's own, one on each device, which `TrainStep.state_dict` saves.
Its seed is drawn from torch's default generator when the store is made, so `torch.manual_seed` makes a run
repeatable. Replicas of a model must draw the same bits or they drift apart, and their programs often seed each rank
differently; so where torch.distributed runs more than one process at the first step, the seed is 0 on every rank.

Note [skipped steps]: a step that a fused optimizer skips on an accelerator still draws bits, which it does not use:
asking would cost a wait. On CPU, and wherever the host decides, a skipped step draws none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import WeightsError
from halfstep.formats import FP16
from halfstep.kernels.reference import stochastic_round
from halfstep.weights.compact import CompactWeights

__all__ = ["StochasticWeights"]


class StochasticWeights(CompactWeights):
    """Low weights that steps round stochastically."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], low: torch.dtype) -> None:
        self._seed = int(torch.randint(0, 2**63 - 1, (), device="cpu"))
        self._generators: dict[torch.device, torch.Generator] = {}
        super().__init__(named, low)

    def state(self) -> dict[str, Any]:
        """Return the seed and the generators' states, by device."""
        states = {str(device): generator.get_state() for device, generator in self._generators.items()}
        return {"seed": self._seed, "generators": states}

    def generators(self) -> Iterable[torch.Generator]:
        """Return the generators of the devices that have trained."""
        return self._generators.values()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with the bits that come after `state`.

        Raises:
            WeightsError: it is no such state, or names a device that is not here; nothing was changed.
        """
        try:
            seed, generators = int(state["seed"]), {}
            for name, saved in state["generators"].items():
                generators[torch.device(name)] = generator = torch.Generator(device=name)
                generator.set_state(saved.cpu())
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise WeightsError(
                "the saved state of stochastic rounding does not fit here: it holds 'seed' and 'generators', a state "
                f"for each device that trained. {type(error).__name__}: {error}"
            ) from error
        self._seed, self._generators = seed, generators

    def _generator(self, device: torch.device) -> torch.Generator:
        found = self._generators.get(device)
        if found is None:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            replicas = distributed and torch.distributed.get_world_size() > 1
            found = self._generators[device] = torch.Generator(device=device)
            found.manual_seed(0 if replicas else self._seed)
        return found

    def _pack(self, key: int, wide: Tensor, *, stepped: bool) -> Tensor:
        if not stepped:
            return wide.to(self.dtype)
        generator = self._generator(wide.device)
        if self.dtype is torch.bfloat16:
            return stochastic_round(wide, generator)
        return FP16.round(wide, mode="stochastic", generator=generator).to(self.dtype)

    def _unpack(self, key: int, low: Tensor) -> Tensor:
        return low.float()
