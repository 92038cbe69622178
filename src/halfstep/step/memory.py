"""Memory: what it takes to run the last update's micro-batches again: references, two small random states, versions.

Nothing is copied but the CPU generator's state (5 KB, under a microsecond), a CUDA generator's (16 bytes, on the host)
and buffers that a forward pass is known to change; BatchNorm's statistics are kept by `Statistics` anyway. Python's and
NumPy's generators are not kept (9 and 34 microseconds a step).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.kernels.host import number, peek
from halfstep.trees import tensors

__all__ = ["MicroBatch", "Memory", "Window", "put_random", "random_states", "versions_of"]

FIRST_COPY = 1 << 26  # bytes of buffers copied before the first step, when it is not known yet which ones change
STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


@dataclass(slots=True)
class MicroBatch:
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


@dataclass(slots=True, eq=False)
class Window:
    """The micro-batches of one update, and the verdict on it.

    Attributes:
        batches: the micro-batches.
        buffers: (module, name, value before the window) of buffers that forward passes change.
        last: number of the last micro-batch.
        scale: 0-dim, the loss scale; None where nobody here knows it.
        flag: 0-dim bool on the device: the update was not applied; None before it.
        bad: that flag, as soon as it has been read.
        lossy: whether a loss was not finite, as soon as that has been read.
    """

    batches: list[MicroBatch] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    last: int = 0
    scale: Tensor | None = None
    flag: Tensor | None = None
    bad: bool | None = None
    lossy: bool | None = None

    @property
    def wrong(self) -> bool:
        """Whether there is something to explain, as far as it has been read."""
        return bool(self.bad or self.lossy)

    def explainable(self) -> bool:
        """Return whether there is something to explain; waits for the device if it has to."""
        return self.wrong or (self.flag is not None and bool(self.flag)) or not self.finite()

    def finite(self) -> bool:
        """Return whether all losses are finite; waits for the device if it has to."""
        return all(math.isfinite(number(loss)) for loss in self.losses())

    def losses(self) -> list[Tensor]:
        """Return the losses that came out."""
        return [kept.loss for kept in self.batches if kept.loss is not None and kept.loss.numel() == 1]


class Memory:
    """Remembers the micro-batches of the window under way, and of the last update until its verdict is known.

    Args:
        model: the user's model.

    Attributes:
        window: the one under way.
        judged: the one of the last update, until its verdict was read and was good, or the next window begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.window = Window()
        self.judged: Window | None = None
        self._changing: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self._watched: list[tuple[nn.Module, str, Tensor, int]] | None = None
        self._landed: list[Tensor] = []  # pinned, on the host: the flag, then losses
        self._event: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Begin a window."""
        if self.judged is not None and self.judged.bad is not None:
            self.judged = None
        self.window = Window()
        if self._watched is None:
            self._watch()
        for module, name in self._changing.values():
            value = module._buffers.get(name)
            if value is not None:
                self.window.buffers.append((module, name, value.clone()))

    def keep(self, number: int, batch: tuple[Any, ...], named: dict[str, Any]) -> MicroBatch:
        """Remember micro-batch `number` and the generators before its forward pass."""
        self.window.last = number
        kept = MicroBatch(batch, named, random_states(), versions_of((batch, named)))
        self.window.batches.append(kept)
        return kept

    def end(self, bad: Tensor, scale: Tensor | None, *, watched: bool = True) -> None:
        """End the window; waits for nothing.

        Args:
            bad: 0-dim bool on the device: its update was not applied.
            scale: 0-dim, the loss scale; None where nobody here knows it.
            watched: whether somebody wants to hear of good updates too; else a CPU lets go of their batches at once.
        """
        window = self.window
        self._find_changing()
        window.scale = scale
        if type(bad) is not Tensor or (bad.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        window.flag = bad
        if bad.is_cuda:
            self._send([bad, *window.losses()])
        elif bad.device.type == "cpu":
            window.lossy = _lossy(window.losses())
        if not watched and window.lossy is False and not peek(bad):
            self.judged, self.window = None, Window()
        else:
            self.judged = window

    def arrived(self, *, wait: bool) -> Window | None:
        """Return the window of the last update if its verdict has just become known.

        Args:
            wait: whether to wait for a verdict under way: for that alone, not for what the device was given since.
        """
        window = self.judged
        if window is None or window.bad is not None or window.flag is None:
            return None
        if window.flag.device.type == "cpu":
            window.bad = peek(window.flag)
        elif window.flag.is_cuda and self._event is not None:
            if not self._event.query():
                if not wait:
                    return None
                self._event.synchronize()
            flag, *losses = self._landed
            window.bad, window.lossy = peek(flag), _lossy(losses)
        else:  # no event to ask: whoever wants to know calls explain()
            return None
        if not window.wrong:
            self.judged = None
        return window

    def _send(self, found: list[Tensor]) -> None:
        """Have a flag and losses copied to the host: by the copy engine, a few bytes each, and nobody waits.

        A loss on another device than the flag would need an event of its own, and is not looked at.
        """
        device = found[0].device
        with torch.cuda.device(device):
            here = [t for t in found if type(t) is Tensor and t.device == device]
            if [t.dtype for t in here] != [t.dtype for t in self._landed]:
                self._landed = [torch.zeros((), dtype=t.dtype, pin_memory=True) for t in here]
            for place, value in zip(self._landed, here, strict=True):  # one copy each: joining them is a kernel
                place.copy_(value.reshape(()), non_blocking=True)
            if self._event is None:
                self._event = torch.cuda.Event()
            self._event.record()

    def _find_changing(self) -> None:
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
                    self.window.buffers.append((module, name, value.detach().clone()))


def _lossy(losses: list[Tensor]) -> bool:
    """Return whether one of some losses, of those in the host's memory, is not finite."""
    return any(type(loss) is Tensor and not loss.is_cuda and not math.isfinite(number(loss)) for loss in losses)


def versions_of(tree: Any) -> list[int]:
    """Return how often each tensor of `tree` has been written to; those of inference mode do not count it."""
    return [t._version for t in tensors(tree) if not t.is_inference()]


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
