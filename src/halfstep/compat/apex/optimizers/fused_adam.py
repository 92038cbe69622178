"""FusedAdam: torch's Adam and AdamW, and Adam without bias correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.compat.apex.optimizers.common import SetGradNone, evaluated, fuses, materialised, refuse_amsgrad

__all__ = ["FusedAdam"]


class FusedAdam(SetGradNone, torch.optim.Adam):
    """Adam and AdamW.

    Args:
        params: parameters or groups.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay of the moments.
        eps: added to the square root.
        adam_w_mode: decoupled weight decay (AdamW) instead of L2.
        weight_decay: its factor.
        amsgrad: not supported, as in Apex.
        set_grad_none: whether `zero_grad` sets gradients to None.
        capturable: the step can be captured in a CUDA graph.
        master_weights: masters without amp; raises RuntimeError: ``amp.initialize(opt_level="O2")`` has them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        if master_weights:
            raise RuntimeError(
                "FusedAdam(master_weights=True): masters belong to the model here; use "
                "amp.initialize(model, optimizer, opt_level='O2'), or hs.prepare(model, optimizer, policy='O2')"
            )
        params = materialised(params)
        self.set_grad_none = set_grad_none
        self.adam_w_mode = adam_w_mode
        fused = True if fuses(params, torch.optim.Adam) and bias_correction and not capturable else None
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            capturable=capturable,
            decoupled_weight_decay=adam_w_mode,
            fused=fused,
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
    ) -> Any:
        """Update the parameters.

        Args:
            closure: evaluates the model again.
            grads: gone in Apex too, as are the three below; raises RuntimeError.
            output_params: as `grads`.
            scale: as `grads`.
            grad_norms: as `grads`.
        """
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step takes no gradients, output parameters, scale or norms any more: make it as you would "
                "make torch.optim.Adam, and call step()"
            )
        if all(group.get("bias_correction", True) for group in self.param_groups):
            return super().step(closure)
        loss = evaluated(closure)
        for group in self.param_groups:
            self._plain(group)
        return loss

    @torch.no_grad()
    def _plain(self, group: dict[str, Any]) -> None:
        """Update one group without bias correction, or with it where the group says so."""
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            number = float(state["step"]) if group["bias_correction"] else None
            if group["decoupled_weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            else:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            first = state["exp_avg"].lerp_(gradient, 1 - beta1)
            second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            bias1 = 1.0 if number is None else 1 - beta1**number
            bias2 = 1.0 if number is None else 1 - beta2**number
            parameter.addcdiv_(first, (second / bias2).sqrt_().add_(group["eps"]), value=-group["lr"] / bias1)
