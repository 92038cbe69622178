"""Update cells: what moves the scale of a `TrainOneStepWithLossScaleCell`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.mindspore.errors import MindSporeTypeError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.scale_rules import cell_rule, check_count, check_factor, check_scale

__all__ = ["DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell"]


class DynamicLossScaleUpdateCell(Cell):
    """Moves a scale: ``cell(loss_scale, overflow)`` changes the tensor `loss_scale` in place and returns `overflow`.

    The counters are an hs.GradScaler's; they are part of `state_dict()`. Waits for nothing.

    Args:
        loss_scale_value: the first scale, at least 1.
        scale_factor: at least 1.
        scale_window: good steps in a row before the scale grows.
    """

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__()
        name = type(self).__name__
        self.loss_scale_value = check_scale(f"{name}: loss_scale_value", loss_scale_value)
        self.scale_factor = check_factor(f"{name}: scale_factor", scale_factor)
        self.scale_window = check_count(f"{name}: scale_window", scale_window)
        self._scaler = hs.GradScaler(rule=cell_rule(self.loss_scale_value, self.scale_factor, self.scale_window))

    def get_loss_scale(self) -> float:
        """Return the first scale; the present one is the tensor that is being updated."""
        return self.loss_scale_value

    @torch.no_grad()
    def construct(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """Answer one step; return `overflow`."""
        if not isinstance(loss_scale, Tensor):
            raise MindSporeTypeError(
                f"{type(self).__name__}: loss_scale={loss_scale!r}; expected the tensor of the scale, which is changed"
            )
        overflow = torch.as_tensor(overflow, device=loss_scale.device)
        self._scaler.update(loss_scale.detach().reshape(()))
        self._scaler.record(overflow)
        self._scaler.update()
        loss_scale.copy_(self._scaler.scale_on(loss_scale.device))
        return overflow

    def get_extra_state(self) -> dict[str, Any]:
        """Return the counters, for `state_dict`."""
        return self._scaler.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        self._scaler.load_state_dict(state)


class FixedLossScaleUpdateCell(Cell):
    """Leaves a scale as it is: ``cell(loss_scale, overflow)`` returns `overflow`.

    Args:
        loss_scale_value: at least 1.
    """

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__()
        self.loss_scale_value = check_scale(f"{type(self).__name__}: loss_scale_value", loss_scale_value)

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self.loss_scale_value

    def construct(self, _: Tensor, overflow: Tensor) -> Tensor:
        """Return `overflow`."""
        return overflow


def updates_scales(cell: object) -> bool:
    """Return whether `cell` can be the scale of a training cell."""
    return isinstance(cell, nn.Module) and callable(getattr(cell, "get_loss_scale", None))
