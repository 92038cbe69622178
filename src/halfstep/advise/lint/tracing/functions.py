"""Functions: where the user's functions and classes are defined, and the autograd Functions in the graph of a loss."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfstep.advise.lint.rule import Hit
from halfstep.formats import LOW_DTYPES

__all__ = ["GraphFunction", "functions_of", "place_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFunction:
    """A torch.autograd.Function of the user in the graph of the loss."""

    name: str
    place: Hit
    ruled: bool  # custom_fwd of torch.amp, or hs.operator, gives its forward a rule for formats
    low: bool  # one of its outputs is


def place_of(target: Any, what: str) -> Hit:
    """Return a hit where a function is defined, or a method of a class; without a place if that is not known."""
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type):
        target = next((vars(target)[name] for name in ("forward", "__init__") if name in vars(target)), target)
    code = getattr(inspect.unwrap(getattr(target, "__func__", target)), "__code__", None)
    return Hit(code.co_firstlineno, what, code.co_filename) if code is not None else Hit(0, what)


def functions_of(loss: Tensor) -> tuple[GraphFunction, ...]:
    """Return the autograd Functions that are written in Python outside torch and halfstep, in the graph of `loss`."""
    found: dict[str, GraphFunction] = {}
    todo, seen = [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        made = getattr(node, "_forward_cls", None)
        if made is None or made.__module__.startswith(("torch.", "halfstep.")):
            continue
        name = made.__name__
        low = any(meta.dtype in LOW_DTYPES for meta in getattr(node, "_input_metadata", ()))
        low = low or (name in found and found[name].low)
        ruled = hasattr(node, "_fwd_used_autocast") or hasattr(node, "halfstep_formats")
        found[name] = GraphFunction(name=name, place=place_of(made, name), ruled=ruled, low=low)
    return tuple(found.values())
