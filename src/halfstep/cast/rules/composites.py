"""Composites: Python functions of torch.nn.functional that torch reports to modes as one operator.

Note [composites]: a mode is off inside its own handler, so such a function (multi_head_attention_forward, normalize,
gumbel_softmax, ...) hides the operators it calls. If it has no rule of its own but calls operators that have one, it is
run from a twin of itself that does not report to modes, with the mode on again, so that its parts get their rules.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.policy.operators import operator_name

__all__ = ["composites", "cross_entropy_in_parts", "name_of_called", "unreported"]


@cache
def _calls(func: types.FunctionType) -> frozenset[str]:
    """Names that a function of torch.nn.functional calls, through helpers of the same module that report nothing."""
    names, todo, seen = set[str](), [func], set[types.FunctionType]()
    while todo:
        current = todo.pop()
        seen.add(current)
        for name in current.__code__.co_names:
            names.add(name)
            helper = current.__globals__.get(name)
            if isinstance(helper, types.FunctionType) and helper not in seen and name.startswith("_"):
                todo.append(helper)
    return frozenset(names)


def composites(ruled: frozenset[str]) -> list[types.FunctionType]:
    """Return the Python functions of torch.nn.functional that report to modes and call a ruled operator."""
    found = []
    for name, func in vars(F).items():
        if not isinstance(func, types.FunctionType) or "handle_torch_function" not in func.__code__.co_names:
            continue
        if any(called != name and (name_of_called(called) in ruled) for called in _calls(func)):
            found.append(func)
    return found


def name_of_called(name: str) -> str | None:
    """Return the operator a bare name inside torch.nn.functional stands for, or None."""
    for space in (F, torch, Tensor):
        func = getattr(space, name, None)
        if callable(func):
            try:
                return operator_name(func)
            except TypeError:  # unhashable
                return None
    return None


@cache
def unreported(func: types.FunctionType) -> types.FunctionType:
    """Return a twin of `func` that does not report itself to torch-function modes; what it calls still does."""
    names = [n for n in func.__globals__ if n.startswith("has_torch_function")]
    quiet = {**func.__globals__, **dict.fromkeys(names, _reports_nothing)}
    twin = types.FunctionType(func.__code__, quiet, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _reports_nothing(*tensors: Any) -> bool:
    return False


def cross_entropy_in_parts(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """F.cross_entropy from log_softmax and nll_loss, for policies with rules for these and none for the whole."""
    if size_average is not None or reduce is not None or label_smoothing or target.is_floating_point():
        return unreported(F.cross_entropy)(  # type: ignore[no-any-return]
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    log_probabilities = F.log_softmax(input, 1 if input.dim() > 1 else 0)
    return F.nll_loss(log_probabilities, target, weight, ignore_index=ignore_index, reduction=reduction)
