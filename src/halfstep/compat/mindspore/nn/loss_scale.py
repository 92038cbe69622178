"""MindSpore's loss scales, carried out by hs.GradScaler: update cells, managers and loss scalers.

With s the scale, f the factor and w the window, all in float32:

`DynamicLossScaler` ("mindspore-scaler"): a bad step gives max(1, s / f), the w-th good step in a row s * f.
`DynamicLossScaleUpdateCell` ("mindspore-cell"): the same, but a bad step gives max(1, s * (1 / f)).
`DynamicLossScaleManager`: as the first in Python floats, without an upper bound; the 1001st bad step in a row raises.

A growth past the largest float32 is not carried out, where MindSpore's cell goes to inf and never comes back. Low
tensors are scaled and unscaled in fp32, where MindSpore's arithmetic in their own format overflows or underflows.
"""

import dataclasses
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compat.mindspore import checks
from halfstep.compat.mindspore.checks import MindSporeRuntimeError, MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.cell import Cell
from halfstep.compat.mindspore.nn.loss import as_fp32

__all__ = [
    "DynamicLossScaleManager", "DynamicLossScaler", "FixedLossScaleManager", "LossScaleManager", "LossScaler",
    "StaticLossScaler", "all_finite",
]  # fmt: skip


def _fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _scaler(preset: str, init: float, factor: float, window: int, backoff: float) -> hs.GradScaler:
    rule = hs.GradScaler(rule=preset).rule
    numbers: dict[str, Any] = {"growth": _fp32(factor), "backoff": backoff, "interval": window, "guard": True}
    return hs.GradScaler(rule=dataclasses.replace(rule, init=_fp32(init), **numbers))


def check_scale(where: str, value: Any, low: float = 1.0, expected: str = "") -> float:
    """Return a loss scale, or another number of at least `low` that float32 can hold, as a float."""
    number = checks.check_number(where, value, expected or "a number, float or int, such as 1024.0")
    fits = low <= value <= hs.formats.FP32.max
    checks.check_value(where, value, fits, expected or f"a finite number of at least {low:g}")
    return number


FACTOR = "a number of at least 1, which good steps multiply the scale by; 2 is usual"


class _UpdateCell(Cell):
    def __init__(self, loss_scale_value: float) -> None:
        super().__init__()
        self.loss_scale_value = check_scale(f"{type(self).__name__}: loss_scale_value", loss_scale_value)

    def get_loss_scale(self) -> float:
        """Return the first scale; the present one is the tensor that is being updated."""
        return self.loss_scale_value


class FixedLossScaleUpdateCell(_UpdateCell):
    """Leaves a scale as it is: ``cell(loss_scale, overflow)`` returns `overflow`."""

    def construct(self, _: Tensor, overflow: Tensor) -> Tensor:
        """Return `overflow`."""
        return overflow


class DynamicLossScaleUpdateCell(_UpdateCell):
    """Moves a scale: ``cell(loss_scale, overflow)`` changes the tensor `loss_scale` in place and returns `overflow`.

    The counters are an hs.GradScaler's; they are part of `state_dict()`. Waits for nothing.

    Args:
        loss_scale_value: the first scale, at least 1.
        scale_factor: at least 1.
        scale_window: good steps in a row before the scale grows.
    """

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__(loss_scale_value)
        name = type(self).__name__
        self.scale_factor = check_scale(f"{name}: scale_factor", scale_factor, expected=FACTOR)
        self.scale_window = checks.check_whole(f"{name}: scale_window", scale_window)
        backoff = _fp32(1.0 / _fp32(self.scale_factor))
        self._scaler = _scaler("mindspore-cell", self.loss_scale_value, self.scale_factor, self.scale_window, backoff)

    @torch.no_grad()
    def construct(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """Update the scale after one step; return `overflow`."""
        expected = "the tensor of the scale, which is changed"
        checks.check_type(f"{type(self).__name__}: loss_scale", loss_scale, Tensor, expected)
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


class LossScaleManager(ABC):
    """The loss scale that `build_train_network` and `Model` train with."""

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
        """Return whether steps with non-finite gradients are counted and change the scale."""
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
        checks.check_bool("FixedLossScaleManager: drop_overflow_update", drop_overflow_update)
        self._drop_overflow_update = drop_overflow_update

    def get_loss_scale(self) -> float:
        """Return the scale."""
        return self._loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return the constructor's argument."""
        return self._drop_overflow_update

    def update_loss_scale(self, overflow: bool) -> None:
        """Do nothing: the scale stays."""

    def get_update_cell(self) -> nn.Module | None:
        """Return a `FixedLossScaleUpdateCell`, or None without `drop_overflow_update`."""
        return FixedLossScaleUpdateCell(self._loss_scale) if self._drop_overflow_update else None


class DynamicLossScaleManager(LossScaleManager):
    """A scale that moves: `get_update_cell` makes the cell that has it during training.

    The manager's own number is a Python float on the host, as in MindSpore, for loops that call `update_loss_scale`
    themselves; it scales nothing.

    Args:
        init_loss_scale: the first scale, at least 1.
        scale_factor: at least 1; may be a float.
        scale_window: good steps in a row before the scale grows.
    """

    def __init__(self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000) -> None:
        self.loss_scale = check_scale("DynamicLossScaleManager: init_loss_scale", init_loss_scale)
        self.scale_factor = check_scale("DynamicLossScaleManager: scale_factor", scale_factor, expected=FACTOR)
        self.scale_window = checks.check_whole("DynamicLossScaleManager: scale_window", scale_window)
        self.increase_ratio, self.decrease_ratio = self.scale_factor, 1.0 / self.scale_factor
        self.cur_iter, self.last_overflow_iter = 1, 0
        self.bad_step, self.bad_step_max = 0, 1000  # MindSpore's number

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


class LossScaler(ABC):
    """Base of loss scalers for loops written by hand; subclass it for one's own."""

    @abstractmethod
    def scale(self, inputs: Any) -> Any:
        """Return `inputs` times the scale."""

    @abstractmethod
    def unscale(self, inputs: Any) -> Any:
        """Return `inputs` divided by the scale."""

    @abstractmethod
    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Move the scale after a step whose gradients were all finite, or not; return whether the scale can move."""


class _OnScaler(LossScaler):
    _scaler: hs.GradScaler

    @property
    def scale_value(self) -> Tensor:
        """A copy of the scale, float32; assign a number or a tensor to set it."""
        return self._scaler.scale_on("cpu").clone()

    @scale_value.setter
    def scale_value(self, value: Tensor | float) -> None:
        number = float(value) if isinstance(value, Tensor) else value
        self._set_scale(check_scale(f"{type(self).__name__}.scale_value", number))

    def _set_scale(self, scale: float) -> None:
        self._scaler.update(scale)

    def scale(self, inputs: Any) -> Any:
        """Return a loss, or a tuple or list of tensors, times the scale; low tensors come back in fp32."""
        return self._scaler.scale(_mapped(inputs, as_fp32, f"{type(self).__name__}.scale"))

    def unscale(self, inputs: Any) -> Any:
        """Return gradients, or a tuple or list of them, divided by the scale, each in its own format."""

        def divide(x: Tensor) -> Tensor:
            inverse = self._scaler.scale_on(x.device).reciprocal()
            return (x.float() * inverse).to(x.dtype) if x.dtype in hs.formats.LOW_DTYPES else x * inverse.to(x.dtype)

        return _mapped(inputs, divide, f"{type(self).__name__}.unscale")

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters as plain numbers."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._scaler.load_state_dict(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(scale_value={self._scaler.get_scale()!r})"


class StaticLossScaler(_OnScaler):
    """A scale that never moves."""

    def __init__(self, scale_value: float) -> None:
        self._set_scale(check_scale("StaticLossScaler: scale_value", scale_value))

    def _set_scale(self, scale: float) -> None:
        self._scaler = hs.GradScaler(rule=hs.ScaleRule.static(scale))

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Return False: the scale stays."""
        return False


class DynamicLossScaler(_OnScaler):
    """A scale that a bad step divides by a factor, and a window of good steps multiplies by it.

    Args:
        scale_value: the first scale, at least 1; it never falls below 1.
        scale_factor: a whole number from 1.
        scale_window: good steps in a row before the scale grows.
    """

    def __init__(self, scale_value: float, scale_factor: int, scale_window: int) -> None:
        scale = check_scale("DynamicLossScaler: scale_value", scale_value)
        self.scale_factor = checks.check_whole("DynamicLossScaler: scale_factor", scale_factor)
        self.scale_window = checks.check_whole("DynamicLossScaler: scale_window", scale_window)
        factor = check_scale("DynamicLossScaler: scale_factor", self.scale_factor, expected=FACTOR)
        self._scaler = _scaler("mindspore-scaler", scale, factor, self.scale_window, 1.0 / _fp32(factor))

    @property
    def counter(self) -> int:
        """Good steps since the scale last moved; assign a number or a tensor to set it."""
        return int(self._scaler.state_dict()["_growth_tracker"])

    @counter.setter
    def counter(self, value: Tensor | int) -> None:
        name = "DynamicLossScaler.counter"
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_floating_point():
                raise MindSporeTypeError(f"{name}: {value!r}; expected one whole number")
            value = int(value)
        expected = f"good steps from 0 and below scale_window={self.scale_window}"
        count = checks.check_whole(name, value, expected, least=0)
        checks.check_value(name, value, count < self.scale_window, expected)
        self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": value})

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Move the scale; waits for nothing. Return True: this scale can move."""
        if isinstance(grads_finite, bool):
            grads_finite = torch.tensor(grads_finite)
        if not isinstance(grads_finite, Tensor) or grads_finite.numel() != 1:
            raise MindSporeTypeError(
                f"DynamicLossScaler.adjust(grads_finite={grads_finite!r}): expected a bool or what all_finite returned"
            )
        self._scaler.record(grads_finite == 0)
        self._scaler.update()
        return True


def all_finite(inputs: Sequence[Any]) -> Tensor:
    """Return a 0-dim bool tensor: whether every element of every tensor is finite; waits for nothing.

    Args:
        inputs: a tuple or list of tensors of any float format; None among them (a parameter without gradient) counts
            for nothing.
    """
    if not isinstance(inputs, (tuple, list)):
        kind = type(inputs).__name__
        raise MindSporeTypeError(f"all_finite takes a tuple or list of tensors, not {kind}; write all_finite((x,))")
    found = [x for x in inputs if x is not None]
    if not found:
        raise MindSporeValueError("all_finite: no tensors; pass the gradients")
    for i, x in enumerate(found):
        if not isinstance(x, Tensor):
            raise MindSporeTypeError(f"all_finite: element {i} is {x!r}; expected tensors")
    home = found[0].device
    flags = [torch.isfinite(x.coalesce().values() if x.is_sparse else x).all().to(home) for x in found]
    return torch.stack(flags).all()


def _mapped(inputs: Any, function: Callable[[Tensor], Tensor], where: str) -> Any:
    if isinstance(inputs, Tensor):
        if not inputs.is_floating_point():
            raise MindSporeTypeError(f"{where}: a tensor of {inputs.dtype}; expected floats")
        return function(inputs)
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_mapped(x, function, where) for x in inputs)
    raise MindSporeTypeError(f"{where}: {inputs!r} is a {type(inputs).__name__}; expected a tensor or a tuple of them")
