"""FusedAdagrad: Adagrad with L2 or decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.compat.apex.optimizers.common import SetGradNone, evaluated

__all__ = ["FusedAdagrad"]


class FusedAdagrad(SetGradNone):
    """Adagrad: gradients divided by the root of the sum of their squares so far.

    https://jmlr.org/papers/v12/duchi11a.html

    Args:
        params: parameters or groups.
        lr: learning rate.
        eps: added to the root.
        weight_decay: its factor.
        set_grad_none: whether `zero_grad` sets gradients to None.
        adagrad_w_mode: decoupled weight decay instead of L2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.set_grad_none = set_grad_none
        self.adagrad_w_mode = bool(adagrad_w_mode)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)
        return loss

    def _update(self, group: dict[str, Any], parameter: Any) -> None:
        if parameter.grad.is_sparse:
            raise RuntimeError("FusedAdagrad takes no sparse gradients; use torch.optim.Adagrad")
        value, gradient = parameter.float(), parameter.grad.float()
        state = self.state[parameter]
        if not state:
            state["sum"] = torch.zeros_like(value)
        if not self.adagrad_w_mode:
            gradient = gradient + group["weight_decay"] * value
        state["sum"].addcmul_(gradient, gradient)
        update = gradient / (state["sum"].sqrt() + group["eps"])
        if self.adagrad_w_mode:
            update = update + group["weight_decay"] * value
        parameter.copy_(value - group["lr"] * update)
