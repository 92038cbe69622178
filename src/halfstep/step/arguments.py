"""What a training step can be made of, checked before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep.arguments import CALLABLE, COUNT, FLAG, MODEL, NONE, PATH, POSITIVE, WHOLE, Kind, a, check, shown
from halfstep.errors import CheckpointError, StepError
from halfstep.scale.scaler import GradScaler
from halfstep.torch_private.distributed import overlaps_with_ddp
from halfstep.update.rates import check_rates

__all__ = [
    "LOSS",
    "check_arguments",
    "check_loss",
    "check_loss_function",
    "check_optimizer",
    "check_saving",
    "check_scheduler",
    "evidence_folder",
    "limit",
    "retries",
]

LOSS = Kind("callable as loss_fn(model, *batch)", CALLABLE.has)
EVIDENCE = Kind("a folder for evidence files", PATH.has)

NOTHING = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)

CRITERIA = ("torch.nn.functional", "torch.nn.modules.loss")
"""Where torch's losses are defined: they take outputs and targets."""

SEVERAL = (
    "; build one TrainStep for each optimizer with its loss (they may share model and scaler=), or give all of them to "
    "hs.prepare(model, [one, other], policy=...) and step them in your own loop"
)


def check_arguments(
    model: object,
    loss_fn: object,
    accumulate: object,
    scaler: object,
    scheduler: object,
    optimizer: object,
    cuda_graph: object,
    update_in_backward: object,
) -> None:
    """Refuse arguments of `TrainStep` that make no sense, alone or together.

    Raises:
        StepError: which one, and what to give instead.
    """
    check("TrainStep", StepError, model=(model, MODEL))
    check_loss_function(loss_fn)
    check(
        "TrainStep",
        StepError,
        accumulate=(accumulate, COUNT),
        cuda_graph=(cuda_graph, FLAG),
        scaler=(scaler, a(GradScaler, words="an hs.GradScaler") | NONE),
        update_in_backward=(update_in_backward, FLAG),
    )
    check_scheduler(scheduler, check_optimizer(optimizer))


def check_loss_function(loss_fn: object) -> None:
    """Refuse what is no loss function of a training step.

    Raises:
        StepError: it cannot be called, or is a loss of torch, which takes no model.
    """
    check("TrainStep", StepError, loss_fn=(loss_fn, LOSS))
    if getattr(loss_fn, "__module__", None) in CRITERIA:
        name = getattr(loss_fn, "__name__", None)
        raise StepError(
            f"loss_fn is called as loss_fn(model, *batch) and is {name or type(loss_fn).__name__}, which takes no "
            f"model; give lambda model, x, y: {f'F.{name}' if name else 'criterion'}(model(x), y)"
        )


def check_optimizer(optimizer: object) -> Optimizer:
    """Refuse what no training step can step; return it.

    Raises:
        StepError: it is no optimizer, updates by itself, needs a closure, or has numbers that no weight survives.
    """
    if not isinstance(optimizer, Optimizer):
        several = isinstance(optimizer, (list, tuple)) and len(optimizer) > 1
        raise StepError(f"optimizer must be a torch optimizer and is {shown(optimizer)}{SEVERAL if several else ''}")
    if overlaps_with_ddp(optimizer):
        raise StepError(
            f"{type(optimizer).__name__}(overlap_with_ddp=True) updates parameters in the backward pass, before "
            "gradients are unscaled, checked and clipped; leave overlap_with_ddp out"
        )
    if inspect.signature(optimizer.step).parameters.get("closure", NOTHING).default is inspect.Parameter.empty:
        raise StepError(
            f"{type(optimizer).__name__} evaluates the loss itself, through a closure, and TrainStep hands it "
            "gradients; prepare the model with hs.prepare(model, optimizer, policy=...) in bf16 or fp32, by a policy "
            "with params='fp32' such as 'mixed', and call optimizer.step(closure) yourself"
        )
    check_rates(optimizer)
    return optimizer


def check_saving(where: str, step: object, path: object, keep: object = None) -> None:
    """Refuse what no checkpoint can be made of, or loaded into.

    Raises:
        CheckpointError: `step` is no `TrainStep`, `path` no path, or `keep` neither a whole number from 1 nor None.
    """
    is_step = hasattr(type(step), "run_backward") and hasattr(type(step), "load_state_dict")
    first = Kind("an hs.TrainStep", lambda _: is_step)
    check(where, CheckpointError, step=(step, first), path=(path, PATH), keep=(keep, COUNT | NONE))


def check_loss(loss: Any) -> None:
    """Refuse what a loss function returned in the place of a real scalar tensor with a gradient.

    Raises:
        StepError: what it is, and what to return instead.
    """
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


def limit(name: str, value: Any) -> float | None:
    """Return a limit of gradients, given as any real number or a tensor of one element, as a float; None for none.

    Raises:
        StepError: it is no positive finite number.
    """
    if value is None:
        return None
    given = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool:
        given = value.item()
    check("TrainStep", StepError, **{name: (given, POSITIVE | NONE)})
    return float(given)


def check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    """Refuse what is no scheduler of `optimizer` that a training step can advance; None is none.

    Raises:
        StepError: what it is, and what to give instead.
    """
    if scheduler is None:
        return
    methods = [getattr(scheduler, name, None) for name in ("step", "state_dict", "load_state_dict")]
    if isinstance(scheduler, (type, Optimizer)) or not all(callable(method) for method in methods):
        raise StepError(
            f"scheduler must be a learning-rate scheduler, an object with step(), state_dict() and load_state_dict(), "
            f"and is {shown(scheduler)}; build one, such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, "
            "T_max=...)"
        )
    needed = [p.name for p in inspect.signature(scheduler.step).parameters.values() if _is_needed(p)]  # type: ignore[attr-defined]
    if isinstance(scheduler, ReduceLROnPlateau) or needed:
        what = "a metric" if isinstance(scheduler, ReduceLROnPlateau) else " and ".join(map(repr, needed))
        raise StepError(
            f"{type(scheduler).__name__} needs {what} at each step; leave it out of TrainStep and call "
            "scheduler.step(metric) yourself after each evaluation"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise StepError("the scheduler belongs to another optimizer than the one this TrainStep steps")


def _is_needed(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return parameter.default is inspect.Parameter.empty and not several


def evidence_folder(blackbox: object) -> Path | None:
    """Return the folder that `blackbox` names; None for True and False.

    Raises:
        StepError: it is neither.
    """
    check("TrainStep", StepError, blackbox=(blackbox, FLAG | EVIDENCE))
    return None if isinstance(blackbox, bool) else Path(blackbox)  # type: ignore[arg-type]


def retries(retry: object, enough: int, *, cuda_graph: bool) -> int:
    """Return how often ``retry=`` lets a window run again; 0 for False.

    Args:
        retry: what the user gave.
        enough: what True stands for.
        cuda_graph: whether the step is to be captured.

    Raises:
        StepError: it is neither a bool nor a whole number from 0; or the step is captured.
    """
    check("TrainStep", StepError, retry=(retry, FLAG | Kind("the most attempts, a whole number from 0,", WHOLE.has)))
    most = (enough if retry else 0) if isinstance(retry, bool) else int(retry)  # type: ignore[call-overload]
    if most and cuda_graph:
        raise StepError(
            f"retry={retry!r}: the host must read each verdict to run a window again, and a CUDA graph makes the "
            "update and moves the scale without it; leave out retry or cuda_graph"
        )
    return most
