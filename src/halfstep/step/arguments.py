"""What a training step can be made of, checked before anything is changed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep.errors import StepError
from halfstep.kernels.native.calls import number
from halfstep.scale.scaler import GradScaler

__all__ = ["RATES", "check_arguments", "check_loss", "check_rates", "evidence_folder", "limit", "retries", "switch"]

NOTHING = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)

CRITERIA = ("torch.nn.functional", "torch.nn.modules.loss")
"""Where torch's losses are defined: they take outputs and targets."""

SEVERAL = (
    "; build one TrainStep for each optimizer with its loss (they may share model and scaler=), or give all of them to "
    "hs.prepare(model, [one, other], policy=...) and step them in your own loop"
)

RATES = ("lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho", "lambd", "lr_decay")
"""Names under which torch's optimizers keep numbers that enter every update; other names may hold infinities."""


def check_arguments(
    model: object,
    loss_fn: object,
    accumulate: object,
    scaler: object,
    scheduler: object,
    optimizer: object,
    *,
    cuda_graph: object,
) -> int:
    """Refuse arguments of `TrainStep` that make no sense, alone or together; return `accumulate` as an int.

    Raises:
        StepError: which one, and what to give instead.
    """
    if not isinstance(model, nn.Module):
        raise StepError(f"model must be a torch.nn.Module and is {_shown(model)}")
    if not callable(loss_fn):
        raise StepError(f"loss_fn must be callable as loss_fn(model, *batch) and is {loss_fn!r}")
    if getattr(loss_fn, "__module__", None) in CRITERIA:
        name = getattr(loss_fn, "__name__", None)
        raise StepError(
            f"loss_fn is called as loss_fn(model, *batch) and is {name or type(loss_fn).__name__}, which takes no "
            f"model; give lambda model, x, y: {f'F.{name}' if name else 'criterion'}(model(x), y)"
        )
    if isinstance(accumulate, bool) or not isinstance(accumulate, Integral) or accumulate < 1:
        raise StepError(f"accumulate must be a whole number of micro-batches from 1 and is {accumulate!r}")
    switch("cuda_graph", cuda_graph)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise StepError(f"scaler must be an hs.GradScaler and is {type(scaler).__name__}; build hs.GradScaler(...)")
    if not isinstance(optimizer, Optimizer):
        several = isinstance(optimizer, (list, tuple)) and len(optimizer) > 1
        raise StepError(f"optimizer must be a torch optimizer and is {_shown(optimizer)}{SEVERAL if several else ''}")
    if getattr(optimizer, "_overlap_with_ddp", False):
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
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer)
    return int(accumulate)


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
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 < float(given) < float("inf"):
        raise StepError(f"{name} must be a positive finite number or None and is {value!r}")
    return float(given)


def _check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    methods = [getattr(scheduler, name, None) for name in ("step", "state_dict", "load_state_dict")]
    if isinstance(scheduler, (type, Optimizer)) or not all(callable(method) for method in methods):
        raise StepError(
            f"scheduler must be a learning-rate scheduler, an object with step(), state_dict() and load_state_dict(), "
            f"and is {_shown(scheduler)}; build one, such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, "
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


def _shown(value: object) -> str:
    """Return a value that may be large as an error shows it."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"


def check_rates(optimizer: Optimizer, names: Iterable[str] = RATES) -> None:
    """Refuse numbers of an optimizer's groups that no weight survives; waits for nothing.

    Raises:
        StepError: which one, of which group.
    """
    for group in optimizer.param_groups:
        for name in names:
            value: Any = group.get(name)
            kind = type(value)
            if kind is float:
                sound = value * 0.0 == 0.0  # nan and infinities, times 0, are nan
            elif kind is tuple and all(type(one) is float for one in value):
                sound = sum(value) * 0.0 == 0.0
            else:
                sound = kind is int or value is None
            if not sound:
                _check_rate(optimizer, group, name, value)


def _check_rate(optimizer: Optimizer, group: dict[str, Any], name: str, value: Any) -> None:
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if type(one) is Tensor and one.device.type == "cpu" and one.numel() == 1 and not one.is_complex():
            one = number(one)
        if isinstance(one, Real) and not math.isfinite(one):
            place = next(i for i, other in enumerate(optimizer.param_groups) if other is group)
            raise StepError(
                f"{type(optimizer).__name__}.param_groups[{place}]['{name}'] is {value!r}, and an update with it would "
                "leave no weight finite; set it to a finite number, and look at what has changed it (a scheduler?)"
            )


def evidence_folder(blackbox: object) -> Path | None:
    """Return the folder that `blackbox` names; None for True and False.

    Raises:
        StepError: it is neither.
    """
    if isinstance(blackbox, bool):
        return None
    if not isinstance(blackbox, (str, Path)) or not str(blackbox):
        raise StepError(f"blackbox={blackbox!r}; expected True, False, or a folder for evidence files")
    return Path(blackbox)


def switch(name: str, value: object) -> bool:
    """Return a setting that is on or off.

    Raises:
        StepError: it is neither.
    """
    if not isinstance(value, bool):
        raise StepError(f"{name} must be True or False and is {value!r}")
    return value


def retries(retry: object, enough: int, *, cuda_graph: bool) -> int:
    """Return how often ``retry=`` lets a window run again; 0 for False.

    Args:
        retry: what the user gave.
        enough: what True stands for.
        cuda_graph: whether the step is to be captured.

    Raises:
        StepError: it is neither a bool nor a whole number from 0; or the step is captured.
    """
    if isinstance(retry, bool):
        most = enough if retry else 0
    elif isinstance(retry, Integral) and int(retry) >= 0:
        most = int(retry)
    else:
        raise StepError(f"retry must be True, False or the most attempts, a whole number from 0, and is {retry!r}")
    if most and cuda_graph:
        raise StepError(
            f"retry={retry!r}: the host must read each verdict to run a window again, and a CUDA graph makes the "
            "update and moves the scale without it; leave out retry or cuda_graph"
        )
    return most
