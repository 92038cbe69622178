"""FusedSGD: torch's SGD, and SGD whose weight decay comes after the momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import required

from halfstep.compat.apex.optimizers.common import SetGradNone, evaluated, fuses, materialised

__all__ = ["FusedSGD"]


class FusedSGD(SetGradNone, torch.optim.SGD):
    """SGD with momentum.

    Args:
        params: parameters or groups.
        lr: learning rate; may be left out if every group has its own.
        momentum: its factor.
        dampening: of the momentum.
        weight_decay: L2 factor.
        nesterov: Nesterov's momentum.
        wd_after_momentum: add the decay after the momentum instead of before.
        materialize_master_grads: kept for Apex's signature; masters' fp32 gradients exist during every step.
        set_grad_none: whether `zero_grad` sets gradients to None.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        params = materialised(params)
        self.set_grad_none = set_grad_none
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        for entry in params if lr is required else ():
            if not isinstance(entry, dict) or "lr" not in entry:
                raise ValueError("FusedSGD: no lr; pass lr=, or give every parameter group one of its own")
        super().__init__(
            params,
            lr=0.0 if lr is required else lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=True if fuses(params, torch.optim.SGD) else None,
        )
        self.defaults["lr"] = lr  # `required` makes add_param_group ask for one

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        if not self.wd_after_momentum:
            for group in self.param_groups:  # parameters may have been lowered since, and a state brings its own form
                if group["fused"] and not fuses([group], torch.optim.SGD):
                    group["fused"] = None
            return super().step(closure)
        loss = evaluated(closure)
        for group in self.param_groups:
            self._decay_last(group)
        return loss

    @torch.no_grad()
    def _decay_last(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            update = parameter.grad
            if group["momentum"]:
                state = self.state[parameter]
                buffer = state.get("momentum_buffer")
                if buffer is None:
                    buffer = state["momentum_buffer"] = update.clone()
                else:
                    buffer.mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])
                update = update.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
            parameter.add_(update.add(parameter, alpha=group["weight_decay"]), alpha=-group["lr"])
