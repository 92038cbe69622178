"""Optimizers of torch's older protocol: ``step(..., grad_scaler=scaler)``.

Such an optimizer (Apex's FusedAdam with ``capturable=True``, optimizers written before torch 1.13) sets
``_step_supports_amp_scaling``, gets the scaler in `step`, and unscales or checks its gradients through it. torch's
GradScaler still serves them (torch/amp/grad_scaler.py of torch 2.13); the three methods below that begin with an
underscore are those of torch's that such optimizers call.
"""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from halfstep.scale import finite
from halfstep.scale.held import HeldScale
from halfstep.scale.rule import ScaleState
from halfstep.scale.turn import Stage, Turn

__all__ = ["OlderProtocol", "takes_scaler"]

_NEWER = ("torch.optim.", "halfstep.")
"""Modules whose optimizers that set the marker take tensors; looking at a signature costs some microseconds."""


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` wants the scaler itself as ``step(grad_scaler=)``."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or type(optimizer).__module__.startswith(_NEWER):
        return False
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


class OlderProtocol(HeldScale):
    """The part of a scaler that serves the older protocol."""

    _verdicts: weakref.WeakKeyDictionary[torch.optim.Optimizer, Tensor]

    @abstractmethod
    def _turn(self, optimizer: torch.optim.Optimizer, method: str) -> Turn: ...

    def _step_older(self, turn: Turn, state: ScaleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``optimizer.step(grad_scaler=self)``; whether it skips a bad step is its own affair, as in torch.

        Not called without any gradient. If it asked for no verdict, its gradients are checked here, for `update`.
        """
        optimizer = turn.optimizer
        if next(finite.gradients(optimizer), None) is None:
            self._verdicts.pop(optimizer, None)
            turn.stage = Stage.STEPPED
            return None
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        if turn.found is None:
            turn.found = finite.check(finite.gradients(optimizer), state.scale)
        if turn.found is not None:
            self._verdicts[optimizer] = turn.found
        turn.stage = Stage.STEPPED
        return result

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Check the gradients, which stay as they are, and return the flag (not zero = bad) by device."""
        state = self._started("_check_inf_per_device")
        self._turn(optimizer, "step").found = finite.check(finite.gradients(optimizer), state.scale)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        """Return the flag of the last check, or of `unscale_`, on every device that has gradients."""
        found = self._turn(optimizer, "step").found
        if found is None:
            return {}
        devices = {gradient.device for _, gradient in finite.gradients(optimizer)}
        return {device: found.to(device, non_blocking=True) for device in devices}

    def _get_scale_async(self) -> Tensor | None:
        """Return the scale as a tensor without waiting; None before the first scaled loss."""
        return None if self._state is None else self._state.scale.float()
