"""What layers share: how weights begin (`weight_init` and its like), their format, and arguments with one value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.compat.mindspore.common.initializer import chosen
from halfstep.compat.mindspore.errors import MindSporeTypeError, MindSporeValueError

__all__ = ["fill", "made_of", "only"]


def fill(name: str, parameter: Tensor | None, value: Any) -> None:
    """Initialise a parameter from a number, a tensor, an Initializer or its name; None leaves torch's."""
    if value is None or parameter is None:
        return
    if not isinstance(value, Tensor):
        start = chosen(name, value)
        with torch.no_grad():
            start(parameter)
        return
    if value.shape != parameter.shape:
        raise MindSporeValueError(
            f"{name}: a tensor of shape {tuple(value.shape)} for weights of {tuple(parameter.shape)}"
        )
    with torch.no_grad():
        parameter.copy_(value)


def made_of(layer: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters of `layer` the format that its argument `dtype` says.

    Raises:
        MindSporeTypeError: not a floating format.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise MindSporeTypeError(f"{type(layer).__name__}: dtype={dtype!r}; expected a float such as mstype.float32")
    layer.to(dtype)


def only(where: str, name: str, value: Any, allowed: Any, instead: str) -> None:
    """Refuse a value of an argument that has but one here.

    Raises:
        MindSporeValueError: `value` is not `allowed`; `instead` says what to write.
    """
    if type(value) is not type(allowed) or value != allowed:
        raise MindSporeValueError(f"{where}: {name}={value!r}; only {allowed!r} exists here: {instead}")
