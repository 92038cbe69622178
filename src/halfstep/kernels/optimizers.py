"""The optimizers that halfstep updates in one pass: their fused updates as data, and the tables that other files read.

A spec says what an update is; its arithmetic on each device has the spec's name: C++ in `native/updates.h`, Triton in
`triton/updates.py`. Here is also Lion, which torch does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.arguments import FLAG, FRACTION, NOT_NEGATIVE, Kind, check
from halfstep.errors import WeightsError
from halfstep.kernels.reference.operators import root, single, update

STATES = 2
"""Most states of a parameter's shape: the kernels read and write up to two."""

COUNTERS = 2
"""Most states of one number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """A fused update, and the optimizers whose arithmetic it is.

    Attributes:
        name: name of the C function (``halfstep_NAME``), of the branch in Triton, and of the operator (``NAME_``).
        types: the optimizers; exact types, since a subclass may have a step of its own.
        states: names of states with the shape of their parameter, at most `STATES`; they begin as zeros.
        counters: names of states of one fp32 number, at most `COUNTERS` -> what each begins as.
        options: what the operator takes after the learning rate, in this order -> float or bool. All have
            ``weight_decay`` and ``maximize``.
        keys: keys of a parameter group that hold the values of `options`, in their order; "betas" holds two.
        reference: ``(value, gradient, lr, *states, *counters, **options) -> (new value, *new states)``. Tensors are
            fp32 and flat; `gradient` is unscaled and has its sign, so ``maximize`` is not among `options`. It writes
            counters in place and nothing else. Each product, sum and root is rounded once, in the order written.
        refused: options of a group with which the optimizer computes something else.
        states_under: option without which the optimizer has no states; "": it always has them.
        other_states: option of a group -> the state that the optimizer's own step keeps under it.
    """

    name: str
    types: tuple[type[Optimizer], ...]
    states: tuple[str, ...]
    counters: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, type]
    keys: tuple[str, ...]
    reference: Callable[..., tuple[Tensor, ...]]
    refused: tuple[str, ...] = ("differentiable",)
    states_under: str = ""
    other_states: Mapping[str, str] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        """The operator of ``torch.ops.halfstep``."""
        return f"{self.name}_"

    def has_states(self, group: Mapping[str, Any]) -> bool:
        """Return whether the parameters of a group have states."""
        return not self.states_under or bool(group[self.states_under])


# ------------------------------------------------------------------ torch's: Adam, SGD without dampening, NAdam


def adam(
    value: Tensor,
    gradient: Tensor,
    lr: float,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> tuple[Tensor, ...]:
    """Make one step; bias corrections and ``lr / correction`` are computed in fp64.

    Kingma and Ba 2014, arXiv 1412.6980; AdamW: Loshchilov and Hutter 2017, arXiv 1711.05101.
    """
    step.add_(1)
    count = float(step)
    size = single(lr / (1 - beta1**count))
    correction = single((1 - beta2**count) ** 0.5)
    if decoupled:
        value = value * single(1 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient + value * single(weight_decay)
    mean = mean + (gradient - mean) * single(1 - beta1)
    square = square * single(beta2) + gradient * gradient * single(1 - beta2)
    return value - size * (mean / (root(square) / correction + single(eps))), mean, square


ADAM = OptimizerSpec(
    name="adam",
    types=(torch.optim.Adam, torch.optim.AdamW),
    states=("exp_avg", "exp_avg_sq"),
    counters={"step": 0.0},
    options={
        "beta1": float, "beta2": float, "eps": float, "weight_decay": float, "decoupled": bool, "maximize": bool,
    },
    keys=("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    reference=adam,
    refused=("amsgrad", "differentiable"),
    other_states={"amsgrad": "max_exp_avg_sq"},
)  # fmt: skip


def sgd(
    value: Tensor,
    gradient: Tensor,
    lr: float,
    average: Tensor | None = None,
    *,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> tuple[Tensor, ...]:
    """Make one step; without momentum there is no average."""
    if weight_decay:
        gradient = gradient + value * single(weight_decay)
    if average is None:
        return (value - gradient * single(lr),)
    average = average * single(momentum) + gradient
    gradient = gradient + average * single(momentum) if nesterov else average
    return value - gradient * single(lr), average


SGD = OptimizerSpec(
    name="sgd",
    types=(torch.optim.SGD,),
    states=("momentum_buffer",),
    options={"momentum": float, "weight_decay": float, "nesterov": bool, "maximize": bool},
    keys=("momentum", "weight_decay", "nesterov", "maximize"),
    reference=sgd,
    refused=("dampening", "differentiable"),
    states_under="momentum",
)

COOLING = 0.96  # of the momentum's schedule: a constant of torch's and of the paper


def nadam(
    value: Tensor,
    gradient: Tensor,
    lr: float,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    product: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    momentum_decay: float,
    decoupled: bool,
) -> tuple[Tensor, ...]:
    """Make one step as torch does; what depends on the number of steps is computed in fp64, but for their product.

    Dozat 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.
    """
    step.add_(1)
    count = float(step)
    momentum = beta1 * (1.0 - 0.5 * COOLING ** (count * momentum_decay))
    following = beta1 * (1.0 - 0.5 * COOLING ** ((count + 1) * momentum_decay))
    product.mul_(single(momentum))
    passed = float(product)
    slope, size = lr * (1.0 - momentum) / (1.0 - passed), lr * following / (1.0 - passed * following)
    if decoupled:
        value = value * single(1 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient + value * single(weight_decay)
    mean = mean + (gradient - mean) * single(1 - beta1)
    square = square * single(beta2) + gradient * gradient * single(1 - beta2)
    below = root(square / single(1 - beta2**count)) + single(eps)
    value = value - single(slope) * (gradient / below)
    return value - single(size) * (mean / below), mean, square


NADAM = OptimizerSpec(
    name="nadam",
    types=(torch.optim.NAdam,),
    states=("exp_avg", "exp_avg_sq"),
    counters={"step": 0.0, "mu_product": 1.0},
    options={
        **dict.fromkeys(("beta1", "beta2", "eps", "weight_decay", "momentum_decay"), float),
        **dict.fromkeys(("decoupled", "maximize"), bool),
    },
    keys=("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
    reference=nadam,
)


# ------------------------------------------------------------------ Lion

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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


# ------------------------------------------------------------------ tables

SPECS = (ADAM, SGD, LION, NADAM)
"""Every fused update."""

BY_OPERATOR: Mapping[str, OptimizerSpec] = {spec.operator: spec for spec in SPECS}
"""Operator of ``torch.ops.halfstep`` -> its spec."""

BY_TYPE: Mapping[type[Optimizer], OptimizerSpec] = {t: spec for spec in SPECS for t in spec.types}
"""Optimizer, an exact type -> its spec."""


def optimizer_names(joined: str, others: Iterable[type[Optimizer]] = ()) -> str:
    """Return the names of the optimizers in `BY_TYPE`, and those of `others`, the last one after the word `joined`."""
    *first, last = dict.fromkeys(optimizer.__name__ for optimizer in (*BY_TYPE, *others))
    return f"{', '.join(first)} {joined} {last}"
