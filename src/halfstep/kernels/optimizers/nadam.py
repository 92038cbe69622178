"""NAdam (Dozat 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ), as torch.optim.NAdam computes it."""

from torch import Tensor
from torch.optim import NAdam

from halfstep.kernels.optimizers.spec import OptimizerSpec
from halfstep.kernels.reference.operators import root, single

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
    """Make one step; what depends on the number of steps is computed in fp64, but for their product."""
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
    types=(NAdam,),
    states=("exp_avg", "exp_avg_sq"),
    counters={"step": 0.0, "mu_product": 1.0},
    options={
        **dict.fromkeys(("beta1", "beta2", "eps", "weight_decay", "momentum_decay"), float),
        **dict.fromkeys(("decoupled", "maximize"), bool),
    },
    keys=("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
    reference=nadam,
)
