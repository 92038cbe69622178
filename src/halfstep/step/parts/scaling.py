"""The loss scale as a part of a training step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ScaleError
from halfstep.scale.scaler import GradScaler
from halfstep.step.part import Part

__all__ = ["Scaling"]


class Scaling(Part):
    """The loss scale of a GradScaler, which moves with each update."""

    def __init__(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self.scaler, self.optimizer = scaler, optimizer

    def loss_scale(self, device: torch.device) -> Tensor:
        """Return a copy of the scale: a window has one, also if another step moves the scaler's meanwhile."""
        return self.scaler.scale_on(device).clone()

    def after_update(self, bad: Tensor) -> Exception | None:
        """Count the update and move the scale; return the scale's alarm, if its rule raises one."""
        self.scaler.record(bad, optimizer=self.optimizer)
        try:
            self.scaler.update()
        except (ScaleError, Warning) as error:
            return error
        return None
