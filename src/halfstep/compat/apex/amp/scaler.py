"""LossScaler: the scale of one loss, with Apex's names over `hs.GradScaler` and its rule ``apex``."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import halfstep as hs
from halfstep.compat.shared import unscaled
from halfstep.torch_private.foreach import foreach_mul_

FLOOR = 2.0**-14  # the smallest normal fp16 number: a scale below it cannot save an fp16 gradient


class LossScaler:
    """The scale of one loss.

    Args:
        loss_scale: "dynamic", or the scale (a number, or text of one).
        init_scale: where a dynamic scale starts, at most `max_loss_scale`.
        scale_factor: what it is multiplied by after `scale_window` good backward passes in a row, and divided by after
            a bad one.
        scale_window: number of backward passes.
        min_loss_scale: the floor; None (or 0) means 2**-14.
        max_loss_scale: the ceiling.
    """

    def __init__(
        self, loss_scale: str | float, init_scale: float = 2.0**16, scale_factor: float = 2.0,
        scale_window: int = 2000, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
    ) -> None:  # fmt: skip
        self.dynamic = loss_scale == "dynamic"
        self._scale_seq_len = scale_window
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._has_overflow = False
        self._checked = False  # the gradients of this pass were checked
        self.delayed = False  # the last pass left the update after an overflow to the next one
        if self.dynamic:
            start = float(min(max_loss_scale, init_scale))
            floor = float(min_loss_scale) if min_loss_scale else min(FLOOR, start)
            rule = hs.ScaleRule(
                init=max(start, floor), growth=float(scale_factor), backoff=1.0 / float(scale_factor),
                interval=scale_window, floor=floor, ceiling=float(max(max_loss_scale, floor)),
                divide=True,
            )  # fmt: skip
        else:
            rule = hs.ScaleRule.static(float(loss_scale))
        self._scaler = hs.GradScaler(rule=rule)

    def loss_scale(self) -> float:
        """Return the current scale; waits for the device."""
        return self._scaler.get_scale()

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        value, rule, state = float(value), self._scaler.rule, self._scaler.state_dict()
        if rule.is_static:
            rule = hs.ScaleRule.static(value)
        else:
            rule = dataclasses.replace(rule, floor=min(rule.floor, value), ceiling=max(rule.ceiling, value))
        before, self._scaler = self._scaler, hs.GradScaler(rule=rule)
        self._scaler.host_reads = before.host_reads
        self._scaler.load_state_dict({**state, "scale": value})
        self._scaler.name_parameters(before.named_parameters())

    @property
    def _unskipped(self) -> int:
        return int(self._scaler.state_dict()["_growth_tracker"])

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._scaler.load_state_dict({**self._scaler.state_dict(), "_growth_tracker": int(value)})

    def mark(self, device: torch.device) -> Tensor:
        """Return a copy of the scale."""
        return self._scaler.scale_on(device).clone()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss in fp32, multiplied by the scale."""
        return self._scaler.scale(loss.float())

    def clear_overflow_state(self) -> None:
        """Forget whether the last pass overflowed."""
        self._has_overflow = False

    def unscale_and_check(self, param_groups: list[dict[str, Any]], *, masters: bool = False) -> None:
        """Unscale the gradients of `param_groups` in place, and note whether one was not finite (one wait).

        With `masters` low parameters get a new fp32 gradient instead of an unscaled low one.
        """
        if all(p.grad is None for group in param_groups for p in group["params"]):
            return
        self._checked = True
        self._has_overflow |= not unscaled(self._scaler, param_groups, masters=masters).passed

    def unscale(
        self, model_grads: Sequence[Tensor], master_grads: Sequence[Tensor], unused_scale: float,
        models_are_masters: bool = False, scale_override: float | None = None,
    ) -> None:  # fmt: skip
        """Write ``model_grads / scale``, or those by `scale_override`, to `master_grads`; note what is not finite.

        Apex ignores `unused_scale` too. With `models_are_masters`, the same tensors, a static scale of 1 does nothing.
        """
        if models_are_masters and not self.dynamic and scale_override is None and self.loss_scale() == 1.0:
            return
        for master, value in zip(master_grads, self._unscaled(model_grads, scale_override), strict=True):
            master.copy_(value)

    def unscale_with_stashed(
        self, model_grads: Sequence[Tensor], stashed_master_grads: Sequence[Tensor], master_grads: Sequence[Tensor],
        scale_override: float | None = None,
    ) -> None:  # fmt: skip
        """Write ``model_grads / scale + stashed_master_grads`` to `master_grads`; otherwise as `unscale`."""
        values = self._unscaled(model_grads, scale_override)
        for master, value, stashed in zip(master_grads, values, stashed_master_grads, strict=True):
            master.copy_(value + stashed)

    def _unscaled(self, grads: Sequence[Tensor], scale: float | None) -> list[Tensor]:
        carriers = []
        for grad in grads:
            carrier = torch.empty_like(grad, dtype=torch.float32)
            carrier.grad = grad.detach().to(torch.float32, copy=True)
            carriers.append(carrier)
        if scale is not None and carriers:
            found = [carrier.grad for carrier in carriers if carrier.grad is not None]
            foreach_mul_(found, 1.0 / scale)
            self._has_overflow |= not all(bool(grad.isfinite().all()) for grad in found)
        elif carriers:
            self._scaler.scale_on(carriers[0].device)
            self.unscale_and_check([{"params": carriers}])
        return [carrier.grad for carrier in carriers if carrier.grad is not None]

    def update_scale(self) -> bool:
        """Update the scale after a pass; return whether the step should be skipped."""
        if not self._checked:
            self._scaler.record(torch.tensor(float(self._has_overflow)))
        self._checked = False
        self._scaler.update()
        return self._has_overflow
