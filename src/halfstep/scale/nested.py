"""Apply a function to every tensor of nested containers of losses; anything else among them is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from halfstep.errors import ScaleError
from halfstep.trees import opened

__all__ = ["map_losses"]


def map_losses(value: Any, function: Callable[[Tensor], Tensor], where: str = "outputs") -> Any:
    """Return `value` with every tensor replaced by ``function(tensor)``.

    Args:
        value: a tensor, or containers (or other iterables) of such, nested at will. Containers come back as their own
            type (a generator as a list); the input is not changed.
        function: called with each tensor.
        where: how a message names `value`.

    Raises:
        ScaleError: something that is neither a tensor nor a container; the message says where.
    """
    if isinstance(value, Tensor):
        return function(value)
    if (node := opened(value)) is not None:
        named, rebuild = node
        return rebuild([map_losses(item, function, where + way) for way, item in named])
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [map_losses(item, function, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ScaleError(
        f"scale: {where} is {value!r} of type {type(value).__name__}; expected a tensor or a (nested) container of "
        "tensors: pass the loss itself, or only the tensors of what the model returned"
    )
