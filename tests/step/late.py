"""A device that is behind its host: flags of CPU tensors that land when the host waits for them, or at `land()`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import halfstep as hs
from halfstep.accelerators import Landing


class Late(Landing):
    """A landing that takes CPU tensors; as CUDA's, it keeps what was sent and shows it after a wait."""

    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        super().__init__()
        self._here = False

    def send(self, found: Sequence[Tensor]) -> None:
        self.flag, self._here = found[0], False
        self._pinned = [value.detach().clone() for value in found]

    def there(self) -> bool:
        return self._here

    def landed(self) -> list[Tensor]:
        self.waits += not self._here
        self._here = True
        return self._pinned

    def sent(self) -> bool:
        """Whether anything was sent."""
        return self.flag is not None

    def land(self) -> None:
        """Let the device catch up."""
        self._here = True


def late(step: hs.TrainStep) -> Late:
    """Let the flags of `step` be late."""
    landing = step.record.landing = Late()
    if step.record.history is not None:
        step.record.history.landing = landing
    return landing
