"""Apply a function to every tensor of nested containers, keeping the containers' types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from halfstep.errors import ScaleError

__all__ = ["map_tensors"]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor], where: str = "outputs") -> Any:
    """Return `value` with every tensor replaced by ``function(tensor)``.

    Args:
        value: a tensor, or lists, tuples, named tuples, mappings (mapped over their values) or other iterables of such,
            nested at will. Containers come back as their own type (a generator as a list); the input is not changed.
        function: called with each floating or complex tensor.
        where: how a message names `value`.

    Raises:
        ScaleError: something that is neither a tensor nor a container, or an integer tensor; the message says where.
    """
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()):
            raise ScaleError(f"scale: {where} is a tensor of {value.dtype}; a loss is floating: pass loss.float()")
        return function(value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # keeps a default_factory, an order and other attributes
        for key in value:
            result[key] = map_tensors(value[key], function, f"{where}[{key!r}]")
        return result
    if isinstance(value, Mapping):
        return type(value)(  # type: ignore[call-arg]
            {key: map_tensors(item, function, f"{where}[{key!r}]") for key, item in value.items()}
        )
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        items = [map_tensors(item, function, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return items
    raise ScaleError(
        f"scale: {where} is {value!r} of type {type(value).__name__}; expected a tensor or a (nested) container of "
        "tensors: pass the loss itself, or only the tensors of what the model returned"
    )
