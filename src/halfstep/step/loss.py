"""A step's loss function: what it may return, what its errors mean, and a call of it without training.

torch names a value of the batch and no tensor ("Target 7 is out of bounds"); `explained` names both. Errors that mixed
formats cause are explained by `cast.regions.dtype_errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from halfstep.arguments import shown
from halfstep.binding.wrappers import unwrap
from halfstep.cast.regions import dtype_errors
from halfstep.cast.regions.opening import opened
from halfstep.cast.rules.recipe import Recipe
from halfstep.cast.state import STATE
from halfstep.errors import BatchError, HalfstepError, StepError
from halfstep.step.part import Batch
from halfstep.trees import graph_of, inputs, map_tensors, place

EXPLAINED = (*dtype_errors.EXPLAINED, IndexError)
"""The kinds of errors that `explained` handles."""

RECOMPUTES = "CheckpointFunctionBackward"
"""The node of a re-entrant checkpoint, which makes and runs a graph of its own in the backward pass."""


class Loss(NamedTuple):
    """A loss as a sum and what it sums over, such as the tokens of a batch: an update is the mean of all.

    The gradient of a window is that of the sums over its micro-batches and ranks, divided by the sum of their weights.
    With a mean for each micro-batch instead, each counts the same, however few tokens it has. `StepResult.loss` is
    the mean of the micro-batch.

    Attributes:
        sum: 0-dim tensor with a gradient.
        weight: a number, or a 0-dim tensor on any device, from 0; a captured step needs a tensor.
        aux: what else there is, any tree.

    Examples:
        >>> def loss_fn(model, x, y):
        ...     return hs.Loss(F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100), (y != -100).sum())
        >>> step = hs.TrainStep(model, optimizer, loss_fn, accumulate=2)
        >>> [step(x, y).due, step(x[:3], y[:3]).due]
        [False, True]
    """

    sum: Tensor
    weight: Tensor | float
    aux: Any = None

    def mean(self) -> tuple[tuple[Tensor, Any], Tensor]:
        """Return the mean, 0 without anything to sum over, with `aux`, and the weight as a 0-dim fp32 tensor."""
        if not isinstance(self.sum, Tensor) or self.sum.numel() != 1:
            raise StepError(f"hs.Loss: sum must be a tensor of one element with a gradient, and is {shown(self.sum)}")
        if isinstance(self.weight, Tensor) and self.weight.numel() == 1 and not self.weight.is_complex():
            weight = self.weight.detach().to(self.sum.device, torch.float32).reshape(())
        elif type(self.weight) in (int, float) and 0.0 <= self.weight < math.inf:
            weight = torch.full((), float(self.weight), dtype=torch.float32, device=self.sum.device)
        else:
            raise StepError(
                f"hs.Loss: weight must be a finite number from 0 or a tensor of one, and is {shown(self.weight)}"
            )
        return (self.sum / torch.where(weight > 0, weight, 1.0), self.aux), weight


def evaluate(
    model: nn.Module, loss_fn: Callable[..., Any], recipe: Recipe, batch: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Return what `loss_fn` returns in evaluation mode, without a wrapper, whose forward may wait for other ranks."""
    model = unwrap(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        if any(training for _, training in modes):
            model.eval()
        with torch.no_grad(), opened(recipe):
            STATE.bound = recipe  # the model is inside, as in a step: its outputs are not cast
            return loss_fn(model, *batch, **named)
    except EXPLAINED as error:
        if (better := explained(error, (batch, named))) is None:
            raise
        raise better from error
    finally:
        if any(training for _, training in modes):
            model.train(modes[0][1])  # by its own method, which may do more than set the mode
            for module, training in modes:
                module.training = training


def check_loss(loss: Any) -> None:
    """Refuse what a loss function returned in the place of a real scalar tensor with a gradient, with a remedy."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got, remedy = type(loss).__name__, "return the loss, or (loss, what else there is)"
        if isinstance(loss, Tensor):
            got, remedy = f"a tensor of shape {tuple(loss.shape)}", "reduce it with .mean() or .sum()"
        elif isinstance(loss, (int, float)):
            remedy = "return the tensor, without .item()"
        elif isinstance(loss, (tuple, list)):
            got = f"{type(loss).__name__} of {len(loss)}"
            remedy = "return (loss, (...)), a tuple of the loss and one tree with all the rest"
        elif hasattr(loss, "loss"):
            remedy = "return (out.loss, out)"
        elif isinstance(loss, Mapping) and "loss" in loss:
            remedy = "return (out['loss'], out)"
        raise StepError(f"loss_fn must return a scalar tensor, or (scalar tensor, aux), and returned {got}; {remedy}")
    if loss.is_complex():
        raise StepError(
            f"loss_fn returned a complex loss ({loss.dtype}), of which no direction is down; return a real number of "
            "it, such as loss.abs() or loss.real"
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss has no gradient: no parameter that requires one took part in it, or loss_fn ran under "
            "torch.no_grad or detached its result"
        )


def detached(aux: Any, loss: Tensor, *, check: bool) -> Any:
    """Return the tree `aux` with its tensors detached: the backward pass frees the graph that they refer to.

    With `check`, a scalar of whose graph nothing leads to `loss` is refused: it would not be trained on.
    """
    if check and isinstance(aux, Tensor) and aux.requires_grad and not aux.dim():
        if get_gradient_edge(aux).node not in graph_of(loss):
            raise StepError(
                "loss_fn returned two scalars with a gradient, (loss, aux), and trains on the first only; for two "
                "losses return their sum and, beside it, what to log: (a + b, (a, b)); for a number to log alone "
                "return (loss, aux.detach())"
            )
    return map_tensors(aux, lambda tensor: tensor.detach() if tensor.requires_grad else tensor)


def explained(error: BaseException, batch: Batch) -> HalfstepError | None:
    """Return an error with cause and remedy for one that the batch or mixed formats cause, else None."""
    said = _out_of_range(error, batch) if isinstance(error, (IndexError, RuntimeError)) else ""
    return BatchError(f"{said}. torch says: {error}") if said else dtype_errors.explained(error, batch)


def _out_of_range(error: BaseException, batch: Batch) -> str:
    """Return which input holds what the operator that raised `error` does not take, "" if that is not known."""
    inside = [f for f, _ in walk_tb(error.__traceback__) if f.f_code.co_filename == functional.__file__]
    found = _taken(inside[-1]) if inside else None  # the innermost function of torch.nn.functional
    if found is None:
        return ""
    values, bad, taken = found
    if not bool(bad.any()):
        return ""
    flat = int(bad.flatten().nonzero()[0])
    value = values.flatten()[flat].item()
    name, where = "a tensor made of the batch", place(values, flat)
    for known, tensor in inputs(*batch):
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
