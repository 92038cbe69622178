"""Adam (Kingma and Ba 2014, arXiv 1412.6980) and AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101)."""

from torch import Tensor
from torch.optim import Adam, AdamW

from halfstep.kernels.optimizers.spec import OptimizerSpec
from halfstep.kernels.reference.operators import root, single


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
    """Make one step; bias corrections and ``lr / correction`` are computed in fp64."""
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
    types=(Adam, AdamW),
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
