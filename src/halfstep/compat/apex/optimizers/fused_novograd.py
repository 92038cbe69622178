"""FusedNovoGrad, a parameter at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.compat.apex.optimizers.common import SetGradNone, bias_corrections, due, evaluated, refuse_amsgrad

__all__ = ["FusedNovoGrad"]


class FusedNovoGrad(SetGradNone):
    """NovoGrad: one second moment for every parameter, of its gradient's norm.

    https://arxiv.org/abs/1905.11286

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: correct the moments for their start.
        betas: decay of the moments.
        eps: added to the norm.
        weight_decay: its factor.
        amsgrad: not supported, as in Apex.
        reg_inside_moment: weight decay goes into the first moment instead of beside it.
        grad_averaging: the first moment averages gradients (``1 - beta1``) instead of summing them.
        norm_type: 2, or 0 for the largest element.
        init_zero: the second moment starts at 0 instead of at the first norm.
        set_grad_none: whether `zero_grad` sets gradients to None.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad: norm_type={norm_type}; expected 2, or 0 for the largest element")
        self.set_grad_none = set_grad_none
        self.reg_inside_moment = reg_inside_moment
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = evaluated(closure)
        for group, params in due(self):
            self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Any]) -> None:
        beta1, beta2 = group["betas"]
        bias1, bias2 = bias_corrections(group)
        root = bias2**0.5
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        for parameter in params:
            gradient, value = parameter.grad.float(), parameter.float()
            size = gradient.norm() if group["norm_type"] == 2 else gradient.abs().max()
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(value)
                state["exp_avg_sq"] = torch.zeros_like(size) if group["init_zero"] else size.clone()
            norm = state["exp_avg_sq"]
            if group["norm_type"] == 2:
                norm.copy_((beta2 * norm.square() + (1 - beta2) * size.square()).sqrt())
            else:
                norm.copy_(beta2 * norm + (1 - beta2) * size)
            below = norm / root + group["eps"]
            first = state["exp_avg"]
            if self.reg_inside_moment:
                first.mul_(beta1).add_(gradient / below + group["weight_decay"] * value, alpha=share)
                update = first / bias1
            else:
                first.mul_(beta1).add_(gradient, alpha=share)
                update = first / bias1 / below + group["weight_decay"] * value
            parameter.copy_(value - group["lr"] * update)
