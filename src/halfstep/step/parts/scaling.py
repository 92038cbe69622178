"""The loss scale as a participant of a training step."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ScaleError
from halfstep.scale.scaler import GradScaler

__all__ = ["Scaling"]


class Scaling:
    """The loss scale as a participant of a training step."""

    def __init__(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self.scaler, self.optimizer = scaler, optimizer

    def after_update(self, bad: Tensor) -> Exception | None:
        """Count the update and move the scale; return the scale's alarm, if its rule raises one."""
        self.scaler.record(bad, optimizer=self.optimizer)
        try:
            self.scaler.update()
        except (ScaleError, Warning) as error:
            return error
        return None
