"""torch.optim.SGD without dampening."""

from torch import Tensor
from torch.optim import SGD as TorchSGD

from halfstep.kernels.optimizers.spec import OptimizerSpec
from halfstep.kernels.reference.operators import single


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
    types=(TorchSGD,),
    states=("momentum_buffer",),
    options={"momentum": float, "weight_decay": float, "nesterov": bool, "maximize": bool},
    keys=("momentum", "weight_decay", "nesterov", "maximize"),
    reference=sgd,
    refused=("dampening", "differentiable"),
    states_under="momentum",
)
