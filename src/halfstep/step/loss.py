"""A step's loss function: what it may return, what its errors mean, and a call of it without training.

torch names a value of the batch and no tensor ("Target 7 is out of bounds"); `explained` names both. Errors that mixed
formats cause are explained by `cast.regions.dtype_errors`. `CompiledLoss` is one through torch.compile, forward and
backward, in the region of the training step.

Note [compiled region]: the region is opened outside the compiled function. Dynamo traces `loss_fn` under the
torch.autocast state and the function mode around it, and guards on both. So a graph break in the user's code is
harmless: the code between two graphs runs in the same region. A region opened inside would be left in the middle of a
`with`, which Dynamo cannot resume under a function mode.

Note [compiled backward]: by default torch traces a backward pass under the autocast state around the compiled
function, and a product that ran in fp32 inside, by a module rule or the user's own autocast(enabled=False), gets low
gradients (2e-3 off, relative). An eager backward pass runs in no region, so this default is switched off while anything
may be compiled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from traceback import walk_tb
from types import FrameType, FunctionType
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
from halfstep.cast.state import STATE, hand_code
from halfstep.errors import BatchError, HalfstepError, StepError, did_you_mean
from halfstep.kernels.watched import by_hand
from halfstep.step.part import Batch
from halfstep.torch_private.compiler import counters, functorch_settings
from halfstep.trees import graph_of, inputs, map_tensors, place

LOG = logging.getLogger("halfstep.step")
OPTIONS = frozenset({"backend", "dynamic", "fullgraph", "mode", "options"})
GRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})  # inductor puts what it compiles into CUDA graphs

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


def run_by_hand(loss_fn: Callable[..., Any], recipe: Recipe, *args: Any, **kwargs: Any) -> Any:
    """Call the loss function of a model with low parameters, whose fp32 values it reads by hand."""
    STATE.bound = hand_code(recipe)
    try:
        by_hand(True)
        return loss_fn(*args, **kwargs)
    finally:
        STATE.bound = recipe


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
            if recipe.policy.params == "low":
                return run_by_hand(loss_fn, recipe, model, *batch, **named)
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


# ---------------------------------------------------------------------- compile=


def compile_options(compile: object, *, accumulate: int, cuda_graph: bool) -> dict[str, Any] | None:
    """Return the arguments for torch.compile that `compile` asks for; None: do not compile."""
    if compile is None or compile is False:
        return None
    if compile is True:
        return {}
    if not isinstance(compile, Mapping):
        raise StepError(f"compile must be True, False or a dict of arguments for torch.compile and is {compile!r}")
    for name in compile:
        if name not in OPTIONS:
            near = did_you_mean(str(name), OPTIONS)
            raise StepError(f"compile={{{name!r}: ...}}: torch.compile takes {', '.join(sorted(OPTIONS))}{near}")
    options = dict(compile)
    backend = options.get("backend", "")
    if not isinstance(backend, str) and not callable(backend):
        raise StepError(f"compile={{'backend': {backend!r}}}: a backend is a name or a function")
    if accumulate > 1 and uses_graphs(options):
        raise StepError(
            f"compile={compile!r} with accumulate={accumulate}: torch's own CUDA graphs overwrite the gradients of "
            "one micro-batch with those of the next; use mode='max-autotune-no-cudagraphs', or cuda_graph=True"
        )
    if cuda_graph and uses_graphs(options):
        raise StepError(
            f"compile={compile!r} makes CUDA graphs of its own, which cuda_graph=True cannot capture; leave one of "
            "them out, or use mode='max-autotune-no-cudagraphs'"
        )
    return options


def uses_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether torch.compile with `options` makes CUDA graphs, whose results the next run overwrites."""
    return options.get("mode") in GRAPH_MODES or bool((options.get("options") or {}).get("triton.cudagraphs"))


def _twin(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `loss_fn` with a code object of its own: a plain function stays the frame that Dynamo can resume."""
    if type(loss_fn) is FunctionType:
        code, names = loss_fn.__code__.replace(), loss_fn.__globals__
        twin = FunctionType(code, names, loss_fn.__name__, loss_fn.__defaults__, loss_fn.__closure__)
        twin.__kwdefaults__ = loss_fn.__kwdefaults__
        vars(twin).update(vars(loss_fn))
        return twin

    def run(*args: Any, **named: Any) -> Any:
        return loss_fn(*args, **named)

    run.__code__ = run.__code__.replace()
    return run


class CompiledLoss:
    """A loss function compiled by torch.compile, to be called in an open region.

    Each has a code object of its own, by which Dynamo counts recompilations, so each has their limit for itself.
    """

    def __init__(self, loss_fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        try:
            self._run = torch.compile(_twin(loss_fn), **options)
        except Exception as error:  # of several kinds: an unknown backend, mode or option
            raise StepError(
                f"compile={dict(options)!r} is refused by torch.compile: {str(error).strip()} (backends: "
                f"{', '.join(torch.compiler.list_backends())})"
            ) from error
        self._overwritten = uses_graphs(options)
        self.breaks: tuple[str, ...] = ()  # why Dynamo broke the graph, each reason once
        self.guarded: list[Any] = []  # what Dynamo's guards refer to, kept alive while the model is not prepared

    def __call__(self, model: Any, *batch: Any, **named: Any) -> Any:
        """Return what the loss function returns."""
        if self._overwritten:
            torch.compiler.cudagraph_mark_step_begin()
        counted = counters()
        frames, before = counted["frames"]["total"], dict(counted["graph_break"])
        settings = functorch_settings()
        around, settings.backward_pass_autocast = settings.backward_pass_autocast, "off"  # note [compiled backward]
        try:
            returned = self._run(model, *batch, **named)
        finally:
            settings.backward_pass_autocast = around
        if counted["frames"]["total"] != frames:  # something was compiled
            self._note([reason for reason, n in counted["graph_break"].items() if n > before.get(reason, 0)])
        return map_tensors(returned, Tensor.clone) if self._overwritten else returned

    def _note(self, reasons: list[str]) -> None:
        new = [reason for reason in reasons if reason not in self.breaks]
        self.breaks += tuple(new)
        for reason in new:
            LOG.warning(
                "TrainStep(compile=...): loss_fn is not one graph, and what lies between its graphs runs eagerly; "
                "compile={'fullgraph': True} makes this an error. Dynamo says: %s",
                reason.strip().partition("\n")[0],
            )
