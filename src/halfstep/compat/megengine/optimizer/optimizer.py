"""The optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from halfstep.compat.megengine.marks import SCALED, marked
from halfstep.errors import ScaleError

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Optimizer"]


Self = TypeVar("Self", bound="Optimizer")


class Optimizer(torch.optim.Optimizer):
    """What the optimizers share: ``opt.step().clear_grad()``; parameters without a gradient are passed over."""

    def step(self: Self, closure: Callable[[], Any] | None = None) -> Self:  # type: ignore[override]
        """Make one step and return this optimizer.

        Args:
            closure: evaluated first, as in torch; its result is not returned.

        Raises:
            ScaleError: a gradient is still multiplied by a GradScaler's scale.
        """
        if any(marked(p.grad, SCALED) for group in self.param_groups for p in group["params"]):
            raise ScaleError(
                f"{type(self).__name__}.step: gradients are still scaled; after scaler.backward(..., "
                "unscale_grad=False) call scaler.unscale(gm.attached_tensors()) and scaler.update() before the step"
            )
        super().step(closure)
        return self

    def clear_grad(self: Self) -> Self:
        """Set every gradient to None and return this optimizer."""
        self.zero_grad(set_to_none=True)
        return self


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum and weight decay."""

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
    ) -> None:
        torch.optim.SGD.__init__(self, params, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with weight decay added to the gradient."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        torch.optim.Adam.__init__(self, params, lr, betas=betas, eps=eps, weight_decay=weight_decay)


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        torch.optim.AdamW.__init__(self, params, lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Adagrad(Optimizer, torch.optim.Adagrad):
    """Adagrad."""

    def __init__(
        self, params: Any, lr: float = 1e-2, lr_decay: float = 0.0, eps: float = 1e-10, weight_decay: float = 0.0
    ) -> None:
        torch.optim.Adagrad.__init__(self, params, lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)
