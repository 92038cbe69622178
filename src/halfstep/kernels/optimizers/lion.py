"""Lion (Chen et al. 2023, arXiv 2302.06675), which torch does not have: its update, and the optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.arguments import FLAG, FRACTION, NOT_NEGATIVE, Kind, check
from halfstep.errors import WeightsError
from halfstep.kernels.optimizers.spec import OptimizerSpec
from halfstep.kernels.reference.operators import single, update

RATE = Kind("a tensor with one such number", lambda rate: isinstance(rate, Tensor) and rate.numel() == 1)
BETAS = Kind(
    "two numbers from 0 and below 1",
    lambda betas: (
        isinstance(betas, (tuple, list)) and len(betas) == 2 and all(FRACTION.has(b) and b < 1 for b in betas)
    ),
)


class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv 2302.06675).

    One state a parameter where AdamW has two. Its steps all have the size of `lr`, which should be 3 to 10 times
    smaller than AdamW's, and `weight_decay` as much larger. Skips on the device (``grad_scale``, ``found_inf``) as
    torch's fused optimizers do; in `TrainStep` it is one operator.

    Args:
        params: parameters or groups of them.
        lr: size of a step.
        betas: how much of the momentum goes into the direction, and how much of it is kept.
        weight_decay: decoupled, relative to `lr`.
        maximize: go up instead of down.

    Raises:
        WeightsError: a value out of its range, or a sparse gradient at a step.

    Examples:
        >>> optimizer = hs.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> step = hs.TrainStep(model, optimizer, loss_fn, policy="O2")
        >>> step(x, y).host().updated
        True
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check(
            "Lion",
            WeightsError,
            lr=(lr, NOT_NEGATIVE | RATE),
            betas=(betas, BETAS),
            weight_decay=(weight_decay, NOT_NEGATIVE),
            maximize=(maximize, FLAG),
        )
        try:
            super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})
        except (TypeError, ValueError, AttributeError) as error:
            raise WeightsError(f"Lion: params must be parameters or groups of them; torch says: {error}") from error

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; `closure` re-evaluates the loss, which is returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        scale, bad = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group, scale, bad)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any], scale: Tensor | None, bad: Tensor | None) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise WeightsError("Lion takes the sign of dense momenta, and a gradient is sparse; use SparseAdam for it")
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum = state["exp_avg"]
        factor = torch.ones((), device=gradient.device) if scale is None else 1 / scale.to(gradient.device)
        weight, moved = (parameter, momentum) if bad is None else (parameter.clone(), momentum.clone())
        numbers = (*group["betas"], group["weight_decay"], group["maximize"])
        options = dict(zip(LION.options, numbers, strict=True))
        states, noises = [moved], (None, None)
        update(lion, weight, None, states, [], gradient, factor, noises, "plain", float(group["lr"]), **options)
        if bad is not None:
            keep = bad.to(gradient.device) != 0
            parameter.copy_(torch.where(keep, parameter, weight))
            momentum.copy_(torch.where(keep, momentum, moved))


def lion(
    value: Tensor, gradient: Tensor, lr: float, average: Tensor, *, beta1: float, beta2: float, weight_decay: float
) -> tuple[Tensor, ...]:
    """Make one step: the sign of an interpolation, and decoupled weight decay."""
    direction = torch.sign(average + (gradient - average) * single(1 - beta1))
    value = value * single(1 - lr * weight_decay) - direction * single(lr)
    return value, average + (gradient - average) * single(1 - beta2)


LION = OptimizerSpec(
    name="lion",
    types=(Lion,),
    states=("exp_avg",),
    options={"beta1": float, "beta2": float, "weight_decay": float, "maximize": bool},
    keys=("betas", "weight_decay", "maximize"),
    reference=lion,
)
