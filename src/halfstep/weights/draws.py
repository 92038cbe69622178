"""The random bits of stochastic rounding: a seed and a count of updates, on every device that trains.

Bits are a function of seed, count, parameter and element (`kernels.reference.operators.noise`): the same through
halfstep's own operators and through torch's optimizers. The count goes on with every update that is applied, and with
those that torch's fused optimizers skip on an accelerator: reading their flag would cost a wait.

Note [seeds]: the seed is what a copy of torch's default generator gives when the object is made: `torch.manual_seed`
makes a run repeatable, and shuffling and dropout after `hs.prepare` are the same under every policy. Replicas of a
model must draw the same bits or they drift apart, and programs often seed each rank differently; so where
torch.distributed runs more than one process at the first update, the seed is 0 on every rank. Parts of sharded
parameters have seeds of their own, by number: with equal bits their rounding errors would be correlated.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import WeightsError, lacks_memory
from halfstep.kernels.reference.operators import noise
from halfstep.meeting import processes

ROUNDING = "halfstep_rounding"
"""Key of an optimizer's state_dict: a state of `Draws` for each store or optimizer state that draws in its step."""

SHARD = 0x9E3779B97F4A7C15  # from the seed of one part of sharded parameters to that of the next; any odd number does


class Draws:
    """Counters of random bits, one on each device for each part of sharded parameters that is there."""

    def __init__(self) -> None:
        self.shared = False  # whether optimizer states draw after the weights in an update, and count it
        copy = torch.default_generator.clone_state()
        self._seed = int(torch.randint(0, 2**63 - 1, (), device="cpu", generator=copy))
        self._counters: dict[torch.device, dict[int, Tensor]] = {}

    def on(self, device: torch.device, shard: int = 0) -> Tensor:
        """Return (seed, count), (2,) int64 on `device`: the same tensor every time."""
        counters = self._counters.setdefault(device, {})
        if 0 not in counters:
            counters[0] = torch.tensor(self._first(), device=device)
        if shard not in counters:
            counters[shard] = counters[0] + torch.tensor([_offset(shard), 0], device=device)
        return counters[shard]

    def _first(self) -> list[int]:
        return [0 if processes()[1] > 1 else self._seed, 0]

    def bits(self, tensor: int, stream: int, like: Tensor, shard: int = 0) -> Tensor:
        """Return 16 bits for every element of `like`, int64, in its shape and memory order."""
        bits = torch.empty_like(like, dtype=torch.int64)
        drawn = noise(self.on(like.device, shard), tensor, stream, like.numel())
        bits.as_strided((like.numel(),), (1,)).copy_(drawn)
        return bits

    def advance(self, device: torch.device, applied: Tensor | int = 1) -> None:
        """Count an update; `applied` is 0-dim on `device`, False where it was skipped."""
        self.on(device)
        for counter in self._counters[device].values():
            counter[1].add_(applied)

    def save_with(self, optimizer: Optimizer) -> None:
        """Save and load the state with that of `optimizer`: a loop that saves this resumes with the same bits."""
        if optimizer not in SAVED_WITH:
            handles = [
                optimizer.register_state_dict_post_hook(_add_state),
                optimizer.register_load_state_dict_pre_hook(_take_state),
            ]
            SAVED_WITH[optimizer] = [], handles
        kept, _ = SAVED_WITH[optimizer]
        if self not in kept:
            kept.append(self)

    def leave(self, optimizer: Optimizer) -> None:
        """End `save_with`."""
        kept, handles = SAVED_WITH.get(optimizer, ([], []))
        kept[:] = [draws for draws in kept if draws is not self]
        if not kept:
            SAVED_WITH.pop(optimizer, None)
            for handle in handles:
                handle.remove()

    def state(self) -> dict[str, Any]:
        """Return the seed and the count on each device that has trained."""
        counts = {str(device): [int(n) for n in counters[0]] for device, counters in self._counters.items()}
        return {"seed": self._seed, "counts": {device: counter for device, counter in counts.items() if counter[1]}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with the bits that come after `state`."""
        try:
            seed, counters = int(state["seed"]), {}
            for name, (start, count) in state["counts"].items():
                device = torch.device(name)
                counters[device] = torch.tensor([int(start), int(count)], device=device)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if lacks_memory(error):
                raise
            raise WeightsError(
                "the saved state of stochastic rounding does not fit here: it holds 'seed' and 'counts', a seed and a "
                f"count for each device that trained. {type(error).__name__}: {error}"
            ) from error
        self._seed = seed
        for device in set(counters) | set(self._counters):
            self.on(device)
            first = counters[device] if device in counters else torch.tensor(self._first(), device=device)
            for shard, counter in self._counters[device].items():
                # in place: a captured update reads this tensor
                counter.copy_(first + torch.tensor([_offset(shard), 0], device=device))


SAVED_WITH = weakref.WeakKeyDictionary[Optimizer, tuple[list[Draws], list[RemovableHandle]]]()
"""What is saved with which optimizer, and the hooks that save it."""


def _add_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = [draws.state() for draws in SAVED_WITH[optimizer][0]]
    return {**state_dict, ROUNDING: states} if states else state_dict


def _take_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    for draws, state in zip(SAVED_WITH[optimizer][0], state_dict.get(ROUNDING, ()), strict=False):
        draws.load_state(state)


def _offset(shard: int) -> int:
    """Return what is added to the seed for a part of sharded parameters, as an int64 that wraps around."""
    found = shard * SHARD % 2**64
    return found - 2**64 if found >= 2**63 else found
