"""Memory: what it takes to run the last update's micro-batches again: references, two small random states, versions.

Nothing is copied but the CPU generator's state (5 KB, under a microsecond), a CUDA generator's (16 bytes, on the host) and
buffers that a forward pass is known to change; BatchNorm's statistics are kept by `Statistics` anyway. Python's and
NumPy's generators are not kept (9 and 34 microseconds a step).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.trees import tensors

__all__ = ["Kept", "Memory", "put_random", "random_states"]

FIRST_COPY = 1 << 26  # bytes of buffers copied before the first step, when it is not known yet which ones change
STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


@dataclass(slots=True)
class Kept:
    """One micro-batch, as it was before its forward pass.

    Attributes:
        batch: the positional arguments of the loss function.
        named: its named arguments.
        random: states of torch's generators, by device.
        versions: how often each tensor of the batch had been written to.
        loss: what came out, detached; None until it has.
        seed: what the backward pass began with; None for 1.
    """

    batch: tuple[Any, ...]
    named: dict[str, Any]
    random: dict[str, Tensor]
    versions: list[int]
    loss: Tensor | None = None
    seed: Tensor | None = None


@dataclass(eq=False)
class Memory:
    """Remembers the micro-batches of one window.

    Args:
        model: the user's model.

    Attributes:
        window: its micro-batches so far.
        buffers: (module, name, value before the window) of buffers that forward passes change.
        first: number of the window's first micro-batch.
    """

    model: nn.Module
    window: list[Kept] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    first: int = 0

    def __post_init__(self) -> None:
        self._changing: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self._watched: list[tuple[nn.Module, str, Tensor, int]] | None = None

    def begin(self, first: int) -> None:
        """Begin a window with micro-batch number `first`."""
        self.window = []
        self.first = first
        self.buffers = []
        if self._watched is None:
            self._watch()
        for module, name in self._changing.values():
            value = module._buffers.get(name)
            if value is not None:
                self.buffers.append((module, name, value.clone()))

    def keep(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Kept:
        """Remember a micro-batch and the generators before its forward pass."""
        kept = Kept(batch, named, random_states(), [t._version for t in tensors((batch, named)) if not t.is_inference()])
        self.window.append(kept)
        return kept

    def end(self) -> None:
        """Find out which buffers the window's forward passes have changed."""
        changed = False
        for module, name, value, version in self._watched or ():
            now = module._buffers.get(name)
            if now is not value or (now is not None and now._version != version):
                self._changing.setdefault((id(module), name), (module, name))
                changed = True
        if changed:
            self._watch()

    def _watch(self) -> None:
        """Note the versions of buffers that are not known to change; before the first step, copy them too."""
        first = self._watched is None
        self._watched = []
        copied = 0
        for module in self.model.modules():
            for name, value in module._buffers.items():
                key = (id(module), name)
                if value is None or key in self._changing or name in STATISTICS or value.is_inference():
                    continue
                self._watched.append((module, name, value, value._version))
                size = value.numel() * value.element_size()
                if first and copied + size <= FIRST_COPY:
                    copied += size
                    self.buffers.append((module, name, value.detach().clone()))


def random_states() -> dict[str, Tensor]:
    """Return the states of torch's generators that a forward pass may draw from, without waiting for a device."""
    states = {"cpu": torch.default_generator.get_state()}
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        index = torch.cuda.current_device()
        states[f"cuda:{index}"] = torch.cuda.default_generators[index].get_state()
    return states


def put_random(states: dict[str, Tensor]) -> None:
    """Put states that `random_states` returned back."""
    for device, state in states.items():
        if device == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.cuda.default_generators[int(device.partition(":")[2])].set_state(state)
