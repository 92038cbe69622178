"""What halfstep's fused update of an optimizer is, as data.

The update itself on each device has the spec's name: C++ in `native/updates.h`, Triton in `triton/updates.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

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
