"""The optimizers: torch's with MegEngine's arguments, whose `step` and `clear_grad` can be chained.

`clip_grad_norm` and `clip_grad_value` go between `GradScaler.unscale` and the step.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfstep.compat.megengine.autodiff.grad_manager import SCALED, marked
from halfstep.compat.shared import listed
from halfstep.errors import ScaleError, StepError

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "clip_grad_norm", "clip_grad_value"]

Self = TypeVar("Self", bound="Optimizer")


class Optimizer(torch.optim.Optimizer):
    """Base of the optimizers: ``opt.step().clear_grad()``; parameters without a gradient are skipped."""

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
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        torch.optim.Adam.__init__(self, params, lr, betas=betas, eps=eps, weight_decay=weight_decay)


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        torch.optim.AdamW.__init__(self, params, lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Adagrad(Optimizer, torch.optim.Adagrad):
    """Adagrad."""

    def __init__(
        self, params: Any, lr: float = 1e-2, lr_decay: float = 0.0, eps: float = 1e-10, weight_decay: float = 0.0
    ) -> None:
        torch.optim.Adagrad.__init__(self, params, lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)


def clip_grad_norm(tensors: Tensor | Iterable[Tensor], max_norm: float, ord: float = 2.0) -> Tensor:
    """Scale gradients together so that their norm is at most `max_norm`; return the norm before."""
    return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type=ord)


@torch.no_grad()
def clip_grad_value(tensors: Tensor | Iterable[Tensor], lower: float, upper: float) -> None:
    """Bring every element of the gradients between `lower` and `upper`."""
    if lower > upper:
        raise StepError(f"clip_grad_value: lower={lower!r} is above upper={upper!r}; exchange them")
    for tensor in listed(tensors):
        if tensor.grad is not None:
            tensor.grad.clamp_(lower, upper)
