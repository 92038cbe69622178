"""Landing: a few values of an update on their way from an accelerator to the host, for which nothing waits.

In: a flag and other 0-dim tensors on one device. Out: their copies in pinned memory, as soon as an event says that
they are there, or after a wait for that event alone: work that was queued since goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.accelerators import capturing, copies_behind_events, type_here

__all__ = ["Landing"]


class Landing:
    """The values that were sent last; sending again takes their place.

    Attributes:
        devices: types of devices that send something; chosen for this machine where a subclass does not.
        flag: the first of them, on its device; None: nothing was sent.
        waits: how often the host has waited for them.
    """

    devices: frozenset[str] = frozenset()

    def __init__(self) -> None:
        if not self.devices:
            self.devices = frozenset(kind for kind in ("cuda", type_here()) if copies_behind_events(kind))
        self.flag: Tensor | None = None
        self.waits = 0
        self._pinned: list[Tensor] = []
        self._event: Any = None

    def send(self, found: Sequence[Tensor]) -> None:
        """Have 0-dim tensors copied to the host by the copy engine, a few bytes each; waits for nothing.

        One on another device than the first would need an event of its own, and is ignored. While a graph is captured
        nothing is sent.
        """
        device = found[0].device
        if capturing(device.type):
            return
        module = torch.get_device_module(device)
        with module.device(device):
            here = [t for t in found if type(t) is Tensor and t.device == device]
            if [t.dtype for t in here] != [t.dtype for t in self._pinned]:
                self._pinned = [torch.zeros((), dtype=t.dtype, pin_memory=True) for t in here]
            for place, value in zip(self._pinned, here, strict=True):  # one copy each: joining them is a kernel
                place.copy_(value.reshape(()), non_blocking=True)
            if self._event is None:
                self._event = module.Event()
            self._event.record()
        self.flag = found[0]

    def there(self) -> bool:
        """Return whether what was sent has landed."""
        return self._event is not None and self._event.query()

    def landed(self) -> list[Tensor]:
        """Return what was sent, on the host; waits until it is there."""
        if self._event is not None and not self.there():
            self.waits += 1
            self._event.synchronize()
        return self._pinned
