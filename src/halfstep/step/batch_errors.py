"""Errors of torch about what a batch holds, in words of the batch: which input, which sample, which values are allowed.

torch names a value and no tensor ("Target 7 is out of bounds"). `explained` is given such an error and the batch, and
returns a `BatchError` that names both; other errors go to `cast.regions.dtype_errors`.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import functional

from halfstep.cast.regions import dtype_errors
from halfstep.errors import BatchError, HalfstepError
from halfstep.trees import inputs, place

__all__ = ["EXPLAINED", "explained"]

EXPLAINED = (*dtype_errors.EXPLAINED, IndexError)
"""The kinds of errors that `explained` handles."""


def explained(error: BaseException, tree: tuple[tuple[Any, ...], dict[str, Any]]) -> HalfstepError | None:
    """Return an error with cause and remedy for one that the batch or mixed formats cause, else None.

    Args:
        error: what the forward pass raised.
        tree: the positional and named arguments of the loss function.
    """
    said = _out_of_range(error, tree) if isinstance(error, (IndexError, RuntimeError)) else ""
    return BatchError(f"{said}. torch says: {error}") if said else dtype_errors.explained(error, tree)


def _out_of_range(error: BaseException, tree: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """Return which input holds what the operator that raised `error` does not take, "" if that is not known."""
    frame, trace = None, error.__traceback__
    while trace is not None:  # the innermost function of torch.nn.functional
        if trace.tb_frame.f_code.co_filename == functional.__file__:
            frame = trace.tb_frame
        trace = trace.tb_next
    found = None if frame is None else _taken(frame)
    if frame is None or found is None:
        return ""
    values, bad, taken = found
    if not bool(bad.any()):
        return ""
    flat = int(bad.flatten().nonzero()[0])
    value = values.flatten()[flat].item()
    name, where = "a tensor made of the batch", place(values, flat)
    for known, tensor in inputs(*tree):
        if tensor.shape == values.shape and bool((tensor == values).all()):
            name = known
    count = int(bad.sum())
    more = f" ({count} such values)" if count > 1 else ""
    return f"{name} holds {value:g} in {where}{more}, and {taken}"


def _taken(frame: FrameType) -> tuple[Tensor, Tensor, str] | None:
    """Return (values, which of them are out of range, what is taken) of a call of torch.nn.functional."""
    op, given = frame.f_code.co_name, frame.f_locals
    if op in {"cross_entropy", "nll_loss"} and not given["target"].is_floating_point():
        target, ignored = given["target"].detach(), given["ignore_index"]
        classes = given["input"].shape[1 if given["input"].dim() > 1 else 0]
        bad = ((target < 0) | (target >= classes)) & (target != ignored)
        return target, bad, f"{op} of {classes} classes takes labels from 0 to {classes - 1}, and {ignored} for none"
    if op == "embedding":
        rows, indices = len(given["weight"]), given["input"].detach()
        bad = (indices < 0) | (indices >= rows)
        return indices, bad, f"the embedding has {rows} rows and takes indices from 0 to {rows - 1}"
    if op == "binary_cross_entropy":
        target = given["target"].detach()
        return target, ~((target >= 0) & (target <= 1)), f"{op} takes targets from 0 to 1"
    return None
