"""Numbers: what the values of one operator call show, as words that rules look for.

`shown` is called twice: before the operator with its arguments, which it may overwrite, and after with its results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import LOW_DTYPES
from halfstep.torch_private.modes import DisableTorchFunction
from halfstep.trees import tensors

__all__ = ["CAST_OVERFLOW", "INFINITE_DERIVATIVE", "MASKED_ROW", "NOT_FINITE", "ROUNDED_INTEGERS", "shown"]

MASKED_ROW = "masked row"
"""A softmax over values that are all -inf."""
INFINITE_DERIVATIVE = "infinite derivative"
"""An argument at a point where the operator's derivative is infinite or nan."""
NOT_FINITE = "not finite"
"""A result with inf or nan from finite arguments."""
CAST_OVERFLOW = "cast overflow"
"""A cast to a low format that makes inf of finite numbers."""
ROUNDED_INTEGERS = "rounded integers"
"""Whole numbers, such as positions, of which a low format makes different ones equal."""

SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})
BOUNDARY = {"sqrt": 0.0, "acos": 1.0, "asin": 1.0}
"""Operator -> magnitude at which its derivative is infinite."""
MASKS = frozenset({"masked_fill", "masked_scatter", "where", "pad", "to", "cat", "stack", "full_like"})
WHOLE = frozenset({"matmul", "mm", "bmm", "mul", "einsum", "outer", "linear", "to"})
LARGEST = 1 << 22
"""Elements up to which values are examined: a reading costs a pass over memory."""


def shown(
    op: str, args: Any, kwargs: Any, outputs: tuple[Tensor, ...] = (), before: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return what the arguments show, or, given the results and what was found `before`, what the call shows."""
    inputs = [t for t in tensors((args, kwargs)) if t.is_floating_point() and t.layout is torch.strided]
    if any(t.numel() > LARGEST for t in (*inputs, *outputs)) or any(t.is_meta for t in inputs):
        return frozenset()
    with DisableTorchFunction(), torch.no_grad():
        if not outputs:
            return frozenset(_of_arguments(op, inputs, args, kwargs))
        return frozenset(_of_results(op, outputs, before))


def _of_arguments(op: str, inputs: list[Tensor], args: Any, kwargs: Any) -> Iterator[str]:
    if op in WHOLE:
        for tensor in tensors((args, kwargs)):
            if not tensor.requires_grad and tensor.layout is torch.strided:
                yield from (f"whole {dtype}" for dtype in _merging(tensor))
    first = inputs[0].detach() if inputs else None
    if first is None or not first.numel():
        return
    if op in SOFTMAXES and first.dim():
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else -1)
        if isinstance(dim, int) and bool((first == -math.inf).all(dim).any()):
            yield MASKED_ROW
    if inputs[0].requires_grad and _at_boundary(op, first, args):
        yield INFINITE_DERIVATIVE
    if all(bool(torch.isfinite(t.detach()).all()) for t in inputs) and _finite_numbers(args, kwargs):
        yield "finite"


def _at_boundary(op: str, values: Tensor, args: Any) -> bool:
    if op in BOUNDARY:
        return bool((values.abs() == BOUNDARY[op]).any())
    power = args[1] if op == "pow" and len(args) > 1 else None
    return isinstance(power, float) and 0 < power < 1 and bool((values == 0).any())


def _finite_numbers(args: Any, kwargs: Any) -> bool:
    return all(math.isfinite(a) for a in (*args, *kwargs.values()) if type(a) is float)


def _merging(values: Tensor) -> Iterator[torch.dtype]:
    """Yield the low formats in which different ones of `values`, if they are whole numbers, become equal."""
    if values.dtype in LOW_DTYPES or values.dtype is torch.bool or values.is_complex() or values.numel() < 2:
        return
    wide = values.double()
    if bool(torch.isfinite(wide).all()) and bool((wide == wide.round()).all()):
        different = wide.unique()
        yield from (d for d in LOW_DTYPES if different.to(d).unique().numel() < different.numel())


def _of_results(op: str, outputs: tuple[Tensor, ...], before: frozenset[str]) -> Iterator[str]:
    low = outputs[0].dtype in LOW_DTYPES
    yield from before & {MASKED_ROW, INFINITE_DERIVATIVE}
    if "finite" in before and not all(bool(torch.isfinite(t.detach()).all()) for t in outputs):
        if op == "to" and low:
            yield CAST_OVERFLOW
        elif op not in MASKS and any(t.requires_grad for t in outputs):
            yield NOT_FINITE
    if f"whole {outputs[0].dtype}" in before:
        yield ROUNDED_INTEGERS
