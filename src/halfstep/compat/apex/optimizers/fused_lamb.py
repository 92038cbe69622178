"""FusedLAMB, with torch's multi-tensor functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.compat.apex.optimizers.common import SetGradNone, bias_corrections, due, evaluated, refuse_amsgrad

__all__ = ["FusedLAMB"]


class FusedLAMB(SetGradNone):
    """LAMB: Adam's direction, scaled for every parameter by its size.

    https://arxiv.org/abs/1904.00962

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay of the moments.
        eps: added to the square root.
        weight_decay: its factor.
        amsgrad: not supported, as in Apex.
        adam_w_mode: decoupled weight decay instead of L2.
        grad_averaging: the first moment averages gradients (``1 - beta1``) instead of summing them.
        set_grad_none: whether `zero_grad` sets gradients to None.
        max_grad_norm: all gradients are scaled down to this norm together; 0 leaves them.
        use_nvlamb: adapt the rate of parameters without weight decay too.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad("FusedLAMB", amsgrad)
        self.set_grad_none = set_grad_none
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = evaluated(closure)
        everything = [p.grad.float() for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not everything:
            return loss
        home = everything[0].device
        norm = torch.stack([n.to(home) for n in torch._foreach_norm(everything)]).norm()
        for group, params in due(self):
            limit = group["max_grad_norm"]
            shrink = (norm / limit).clamp(min=1.0) if limit and limit > 0 else torch.ones_like(norm)
            self._update(group, params, shrink)
        return loss

    def _update(self, group: dict[str, Any], params: list[Any], shrink: Tensor) -> None:
        beta1, beta2 = group["betas"]
        decay, lr = group["weight_decay"], group["lr"]
        grads = [p.grad.float() / shrink.to(p.device) for p in params]
        values = [p.float() for p in params]
        first, second = _moments(self.state, params)
        if not self.adam_w_mode and decay:
            torch._foreach_add_(grads, values, alpha=decay)
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        bias1, bias2 = bias_corrections(group)
        below = torch._foreach_sqrt(torch._foreach_div(second, bias2))
        torch._foreach_add_(below, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(first, bias1), below)
        if self.adam_w_mode and decay:
            torch._foreach_add_(updates, values, alpha=decay)
        rates: list[Tensor] = []
        for size, slope in zip(torch._foreach_norm(values), torch._foreach_norm(updates), strict=True):
            ratio = torch.where((size != 0) & (slope != 0), size / slope, torch.ones_like(size))
            rates.append(lr * ratio if self.use_nvlamb or decay else lr * torch.ones_like(size))
        for parameter, value, update, rate in zip(params, values, updates, rates, strict=True):
            parameter.copy_(value - rate * update)


def _moments(state: Any, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the two moments of every parameter, made on first use."""
    for parameter in params:
        if not state[parameter]:
            state[parameter]["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
    return [state[p]["exp_avg"] for p in params], [state[p]["exp_avg_sq"] for p in params]
