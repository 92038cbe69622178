"""The numbers of an optimizer that enter every update: learning rate, decay, betas and the like."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import StepError
from halfstep.kernels.native.calls import number

__all__ = ["RATES", "check_rates"]

RATES = ("lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho", "lambd", "lr_decay")
"""Names under which torch's optimizers keep numbers that enter every update; other names may hold infinities."""


def check_rates(optimizer: Optimizer, names: Iterable[str] = RATES) -> None:
    """Refuse numbers of an optimizer's groups that no weight survives; waits for nothing."""
    for group in optimizer.param_groups:
        for name in names:
            value: Any = group.get(name)
            kind = type(value)
            if kind is float:
                sound = value * 0.0 == 0.0  # nan and infinities, times 0, are nan
            elif kind is tuple and all(type(one) is float for one in value):
                sound = sum(value) * 0.0 == 0.0
            else:
                sound = kind is int or value is None
            if not sound:
                _check_rate(optimizer, group, name, value)


def _check_rate(optimizer: Optimizer, group: dict[str, Any], name: str, value: Any) -> None:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if type(one) is Tensor and one.device.type == "cpu" and one.numel() == 1 and not one.is_complex():
            one = number(one)
        if isinstance(one, Real) and not math.isfinite(one):
            place = next(i for i, other in enumerate(optimizer.param_groups) if other is group)
            raise StepError(
                f"{type(optimizer).__name__}.param_groups[{place}]['{name}'] is {value!r}, and an update with it would "
                "leave no weight finite; set it to a finite number, and look at what has changed it (a scheduler?)"
            )
