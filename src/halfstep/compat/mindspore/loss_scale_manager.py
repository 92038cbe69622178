"""Loss-scale managers: what `build_train_network` and `Model` are told about scaling."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from halfstep.compat.mindspore.errors import MindSporeRuntimeError, MindSporeTypeError
from halfstep.compat.mindspore.nn.scale import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from halfstep.compat.mindspore.scale_rules import check_count, check_factor, check_scale

__all__ = ["DynamicLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]

MOST_BAD_STEPS = 1000
"""Bad steps in a row that a dynamic manager takes; MindSpore's number."""


class LossScaleManager(ABC):
    """What every manager offers."""

    @abstractmethod
    def get_loss_scale(self) -> float:
        """Return the scale."""

    @abstractmethod
    def update_loss_scale(self, overflow: bool) -> None:
        """Count a step."""

    @abstractmethod
    def get_update_cell(self) -> nn.Module | None:
        """Return a new cell that moves a scale during training; None: gradients are not checked."""

    def get_drop_overflow_update(self) -> bool:
        """Return whether steps with non-finite gradients are counted and answered."""
        return True


class FixedLossScaleManager(LossScaleManager):
    """A scale that stays.

    Args:
        loss_scale: at least 1.
        drop_overflow_update: whether the training cell reports overflow (a `TrainOneStepWithLossScaleCell`). With False
            it returns the loss alone; steps that are not finite are left out all the same.
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        self._loss_scale = check_scale("FixedLossScaleManager: loss_scale", loss_scale)
        if not isinstance(drop_overflow_update, bool):
            raise MindSporeTypeError(
                f"FixedLossScaleManager: drop_overflow_update={drop_overflow_update!r}; expected True or False"
            )
        self._drop_overflow_update = drop_overflow_update

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return what was said at construction."""
        return self._drop_overflow_update

    def update_loss_scale(self, overflow: bool) -> None:
        """Take note of nothing: the scale stays."""

    def get_update_cell(self) -> nn.Module | None:
        """Return a `FixedLossScaleUpdateCell`, or None without `drop_overflow_update`."""
        return FixedLossScaleUpdateCell(self._loss_scale) if self._drop_overflow_update else None


class DynamicLossScaleManager(LossScaleManager):
    """A scale that moves: `get_update_cell` makes the cell that carries it during training.

    The manager's own number is a Python float on the host, as in MindSpore, for loops that call `update_loss_scale`
    themselves; it scales nothing.

    Args:
        init_loss_scale: the first scale, at least 1.
        scale_factor: at least 1; may be a float.
        scale_window: good steps in a row before the scale grows.
    """

    def __init__(self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000) -> None:
        self.loss_scale = check_scale("DynamicLossScaleManager: init_loss_scale", init_loss_scale)
        self.scale_factor = check_factor("DynamicLossScaleManager: scale_factor", scale_factor)
        self.scale_window = check_count("DynamicLossScaleManager: scale_window", scale_window)
        self.increase_ratio, self.decrease_ratio = self.scale_factor, 1.0 / self.scale_factor
        self.cur_iter, self.last_overflow_iter = 1, 0
        self.bad_step, self.bad_step_max = 0, MOST_BAD_STEPS

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self.loss_scale

    def update_loss_scale(self, overflow: bool | Tensor) -> None:
        """Count a step and move the scale.

        Raises:
            MindSporeRuntimeError: more than 1000 bad steps in a row.
        """
        if bool(overflow):
            self.loss_scale = max(self.loss_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
            self.bad_step += 1
        else:
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.loss_scale *= self.scale_factor
            self.bad_step = 0
        if self.bad_step > self.bad_step_max:
            raise MindSporeRuntimeError(
                f"{self.bad_step} steps in a row had gradients that are not finite, and the loss scale is "
                f"{self.loss_scale!r}: scaling cannot help. Look for nan in data, loss and weights, or lower the "
                "learning rate"
            )
        self.cur_iter += 1

    def get_update_cell(self) -> nn.Module:
        """Return a new `DynamicLossScaleUpdateCell` that starts from the manager's present scale."""
        return DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)
