"""Trees: containers of tensors, flattened and rebuilt with their type.

Containers are what models take and return: lists, tuples, named tuples, mappings of every kind (an OrderedDict, a
defaultdict, a Hugging Face ModelOutput), dataclasses, and types registered with torch.utils._pytree.
"""

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from halfstep.torch_private.trees import SUPPORTED_NODES

__all__ = ["keyed", "map_tensors", "opened", "tensors"]

Rebuild = Callable[[Sequence[Any]], Any]


def opened(value: Any) -> tuple[list[tuple[str, Any]], Rebuild] | None:
    """Return the items of a container with their subscripts, and a function that makes a container of other items.

    Args:
        value: any object.

    Returns:
        ``([("[0]", item), ...], rebuild)``; ``rebuild(items)`` is a new container of the same type. None if `value` is
        no container; text is none.

    Examples:
        >>> items, rebuild = hs.trees.opened({"a": 1, "b": 2})
        >>> items
        [("['a']", 1), ("['b']", 2)]
        >>> rebuild([3, 4])
        {'a': 3, 'b': 4}
    """
    kind = type(value)
    if isinstance(value, (list, tuple)):
        named = [(f"[{index}]", item) for index, item in enumerate(value)]
        return named, (lambda items: kind(*items)) if hasattr(value, "_fields") else kind
    if kind is dict or kind is OrderedDict:
        return _entries(value), lambda items: kind(list(zip(value, items, strict=True)))  # Dynamo takes no zip
    node = SUPPORTED_NODES.get(kind)
    if node is not None:
        parts, context = node.flatten_fn(value)
        return [(f"<{index}>", part) for index, part in enumerate(parts)], lambda items: node.unflatten_fn(
            list(items), context
        )
    if isinstance(value, MutableMapping):
        return _entries(value), lambda items: _refilled(value, items)
    if isinstance(value, Mapping):
        return _entries(value), lambda items: kind(dict(zip(value, items, strict=True)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        return [(f".{name}", getattr(value, name)) for name in fields], lambda items: _refielded(value, fields, items)
    return None


def _entries(mapping: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    return [(f"[{key!r}]", item) for key, item in mapping.items()]


def _refilled(mapping: MutableMapping[Any, Any], items: Sequence[Any]) -> Any:
    result = copy.copy(mapping)  # keeps its other attributes
    for key, item in zip(mapping, items, strict=True):
        result[key] = item
    return result


def _refielded(record: Any, fields: Sequence[str], items: Sequence[Any]) -> Any:
    result = object.__new__(type(record))  # not dataclasses.replace: that calls __init__ and __post_init__ again
    for name, value in getattr(record, "__dict__", {}).items():
        object.__setattr__(result, name, value)
    for name, item in zip(fields, items, strict=True):
        object.__setattr__(result, name, item)  # also of a frozen dataclass: the copy is new
    return result


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `tree` with every tensor replaced by ``function(tensor)``.

    Containers keep their type; one in which nothing changed is returned itself, and so is an object that is neither
    container nor tensor. The input is not changed.

    Examples:
        >>> hs.trees.map_tensors({"x": torch.ones(2), "n": 3}, lambda tensor: tensor.shape)
        {'x': torch.Size([2]), 'n': 3}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    node = opened(tree)
    if node is None:
        return tree
    named, rebuild = node
    items = [map_tensors(item, function) for _, item in named]
    if torch.compiler.is_compiling():  # Dynamo cannot compare the identity of tensors
        return rebuild(items)
    if all(map(is_, items, [old for _, old in named])):
        return tree
    return rebuild(items)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of `tree` in order.

    Examples:
        >>> len(hs.trees.tensors([x, {"y": y}]))
        2
    """
    if isinstance(tree, Tensor):
        return [tree]
    node = opened(tree)
    return [] if node is None else [found for _, item in node[0] for found in tensors(item)]


def keyed(tree: Any, key: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of `tree` in order, each with the innermost name on the way to it; "" without one.

    Examples:
        >>> [name for name, tensor in hs.trees.keyed({"ids": x, "more": [y]})]
        ['ids', 'more']
    """
    if isinstance(tree, Tensor):
        return [(key, tree)]
    found = []
    node = opened(tree)
    for subscript, item in [] if node is None else node[0]:
        name = subscript.strip("[].<>'\"")
        found += keyed(item, key if name.isdigit() else name)
    return found


def inputs(batch: tuple[Any, ...], named: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of a batch in the order of `trees.tensors`: "input 0", "input 1 (labels)"."""
    return [
        (f"input {index}" + (f" ({key})" if key else ""), tensor)
        for index, (key, tensor) in enumerate(keyed((batch, named)))
    ]


def place(tensor: Tensor, flat: int) -> str:
    """Return "sample 1 at [0, 2]" for an index into the flattened tensor."""
    if not tensor.dim():
        return "its one value"
    where = [int(index) for index in torch.unravel_index(torch.tensor(flat, device="cpu"), tensor.shape)]
    return f"sample {where[0]}" + (f" at {where[1:]}" if len(where) > 1 else "")


def graph_of(result: Tensor, *, without: Tensor | None = None) -> Iterator[Node]:
    """Yield the autograd nodes that `result` comes from, each once, without those reached only through `without`."""
    waiting = [get_gradient_edge(result).node]
    seen = set(waiting)  # keeps the nodes alive: torch makes their Python objects on demand
    if without is not None:
        end = get_gradient_edge(without).node
        waiting = [node for node in waiting if node is not end]
        seen.add(end)
    for node in waiting:
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
