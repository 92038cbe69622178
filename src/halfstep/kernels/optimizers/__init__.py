"""The optimizers that halfstep updates in one pass: a file each, and the tables that other files read."""

from collections.abc import Iterable, Mapping

from torch.optim import Optimizer

from halfstep.kernels.optimizers.adam import ADAM
from halfstep.kernels.optimizers.lion import LION
from halfstep.kernels.optimizers.nadam import NADAM
from halfstep.kernels.optimizers.sgd import SGD
from halfstep.kernels.optimizers.spec import COUNTERS, STATES, OptimizerSpec

__all__ = ["BY_OPERATOR", "BY_TYPE", "COUNTERS", "SPECS", "STATES", "OptimizerSpec", "optimizer_names"]

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
