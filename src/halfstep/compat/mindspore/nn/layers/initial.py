"""How a layer's weights begin: MindSpore's `weight_init` and its like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.compat.mindspore.errors import MindSporeValueError

__all__ = ["fill"]


def fill(name: str, parameter: Tensor | None, value: Any) -> None:
    """Initialise a parameter from a number, a tensor or the name of a simple rule; None leaves torch's."""
    if value is None or parameter is None:
        return
    with torch.no_grad():
        if isinstance(value, Tensor):
            if value.shape != parameter.shape:
                raise MindSporeValueError(
                    f"{name}: a tensor of shape {tuple(value.shape)} for weights of {tuple(parameter.shape)}"
                )
            parameter.copy_(value)
        elif value in ("zeros", "ones"):
            parameter.fill_(float(value == "ones"))
        elif value == "normal":
            parameter.normal_(0.0, 0.01)  # MindSpore's Normal
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            parameter.fill_(value)
        else:
            raise MindSporeValueError(
                f"{name}={value!r}; expected a tensor, a number, 'zeros', 'ones', 'normal' or None for torch's "
                "initialisation; for others use torch.nn.init on the layer's weight"
            )
