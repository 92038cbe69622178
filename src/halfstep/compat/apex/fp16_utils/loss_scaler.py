"""Loss scales by hand: one that stays, and one that finds itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs

__all__ = ["DynamicLossScaler", "LossScaler"]


class LossScaler:
    """A scale that stays.

    Args:
        scale: the scale.
    """

    def __init__(self, scale: float = 1) -> None:
        self._scaler = hs.GradScaler(rule=self._rule(float(scale)))

    def _rule(self, scale: float) -> hs.ScaleRule:
        return hs.ScaleRule.static(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a scale that stays has no answer to an overflow."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: the scale stays."""

    @property
    def cur_scale(self) -> float:
        """The scale; may be set."""
        return self._scaler.get_scale()

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._scaler = hs.GradScaler(rule=self._rule(float(value)))

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def scale_gradient(self, module: nn.Module, grad_in: Sequence[Tensor | None], grad_out: Any) -> tuple[Any, ...]:
        """Return the gradients `grad_in` multiplied by the scale: a backward hook for a module."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        self._scaler.scale(loss).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that grows after `scale_window` good steps in a row and shrinks at a bad one, never below 1.

    Args:
        init_scale: the first scale.
        scale_factor: what it is multiplied or divided by.
        scale_window: number of steps.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self.scale_factor = float(scale_factor)
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1
        super().__init__(init_scale)

    def _rule(self, scale: float) -> hs.ScaleRule:
        return hs.ScaleRule(
            init=scale,
            growth=self.scale_factor,
            backoff=1.0 / self.scale_factor,
            interval=self.scale_window,
            floor=min(1.0, scale),
            ceiling=float(torch.finfo(torch.float32).max),
            divide=True,
        )

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of `params` is not finite."""
        return any(p.grad is not None and self._has_inf_or_nan(p.grad) for p in params)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return not bool(x.isfinite().all())

    def update_scale(self, overflow: bool) -> None:
        """Let the scale answer a step."""
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self._scaler.record(torch.tensor(float(overflow)))
        self._scaler.update()
        self.cur_iter += 1
