"""The loss scalers of the functional style: `LossScaler`, `StaticLossScaler`, `DynamicLossScaler`, `all_finite`.

Thin: the scale and its rule are an hs.GradScaler. Low tensors are scaled and unscaled in fp32, where MindSpore's
arithmetic in their own format gives inf above 65504 and silent zeros beyond 2**24.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import halfstep as hs
from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.scale_rules import check_count, check_factor, check_scale, scaler_rule

__all__ = ["DynamicLossScaler", "LossScaler", "StaticLossScaler", "all_finite"]

LOWS = (torch.float16, torch.bfloat16)


class LossScaler(ABC):
    """What every loss scaler offers; subclass it for one's own."""

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
    """A loss scaler whose scale is that of an hs.GradScaler."""

    def __init__(self, rule: hs.ScaleRule) -> None:
        self._scaler = hs.GradScaler(rule=rule)

    @property
    def scale_value(self) -> Tensor:
        """A copy of the scale, float32; assign a number or a tensor to set it."""
        return self._scaler.scale_on("cpu").clone()

    @scale_value.setter
    def scale_value(self, value: Tensor | float) -> None:
        number = float(value) if isinstance(value, Tensor) else value
        self._scaler.update(check_scale(f"{type(self).__name__}.scale_value", number))

    def scale(self, inputs: Any) -> Any:
        """Return a loss, or a tuple or list of tensors, times the scale; low tensors come back in fp32.

        Raises:
            MindSporeTypeError: something that is not a float tensor.
        """
        name = f"{type(self).__name__}.scale"
        return self._scaler.scale(_mapped(inputs, lambda x: x.float() if x.dtype in LOWS else x, name))

    def unscale(self, inputs: Any) -> Any:
        """Return gradients, or a tuple or list of them, divided by the scale, each in its own format.

        Raises:
            MindSporeTypeError: something that is not a float tensor.
        """

        def divide(x: Tensor) -> Tensor:
            inverse = self._scaler.scale_on(x.device).reciprocal()
            return (x.float() * inverse).to(x.dtype) if x.dtype in LOWS else x * inverse.to(x.dtype)

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
    """A scale that never moves.

    Args:
        scale_value: at least 1.
    """

    def __init__(self, scale_value: float) -> None:
        super().__init__(hs.ScaleRule.static(check_scale("StaticLossScaler: scale_value", scale_value)))

    @property
    def scale_value(self) -> Tensor:
        """A copy of the scale, float32."""
        return self._scaler.scale_on("cpu").clone()

    @scale_value.setter
    def scale_value(self, value: Tensor | float) -> None:
        number = float(value) if isinstance(value, Tensor) else value
        self._scaler = hs.GradScaler(rule=hs.ScaleRule.static(check_scale("StaticLossScaler.scale_value", number)))

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
        self.scale_factor = check_count("DynamicLossScaler: scale_factor", scale_factor)
        self.scale_window = check_count("DynamicLossScaler: scale_window", scale_window)
        factor = check_factor("DynamicLossScaler: scale_factor", self.scale_factor)
        super().__init__(scaler_rule(scale, factor, self.scale_window))

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
        if isinstance(value, bool) or not isinstance(value, int):
            raise MindSporeTypeError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number")
        if not 0 <= value < self.scale_window:
            raise MindSporeValueError(
                f"{name}={value!r}; expected good steps from 0 and below scale_window={self.scale_window}"
            )
        self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": value})

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Move the scale; waits for nothing. Return True: this scale can move.

        Raises:
            MindSporeTypeError: neither a bool nor a tensor of one element.
        """
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

    Raises:
        MindSporeTypeError: a bare tensor, or something that is not a tensor.
        MindSporeValueError: nothing to look at.
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


def _mapped(inputs: Any, function: Any, where: str) -> Any:
    """Return a tensor, or a tuple or list of tensors, with `function` applied."""
    if isinstance(inputs, Tensor):
        if not inputs.is_floating_point():
            raise MindSporeTypeError(f"{where}: a tensor of {inputs.dtype}; expected floats")
        return function(inputs)
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_mapped(x, function, where) for x in inputs)
    raise MindSporeTypeError(f"{where}: {inputs!r} is a {type(inputs).__name__}; expected a tensor or a tuple of them")
