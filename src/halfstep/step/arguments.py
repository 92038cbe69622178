"""What a training step can be made of, checked before anything is changed."""

from __future__ import annotations

import inspect
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep.errors import StepError
from halfstep.scale.scaler import GradScaler

__all__ = ["check_arguments", "evidence_folder"]

NOTHING = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)


def check_arguments(
    loss_fn: object,
    clip_norm: float | None,
    clip_value: float | None,
    accumulate: int,
    scaler: object,
    scheduler: object,
    optimizer: object,
) -> None:
    """Refuse arguments of `TrainStep` that make no sense, alone or together.

    Raises:
        StepError: which one, and what to give instead.
    """
    if not callable(loss_fn):
        raise StepError(f"loss_fn must be callable as loss_fn(model, *batch) and is {loss_fn!r}")
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise StepError(f"{name} must be a positive finite number or None and is {value!r}")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise StepError(f"accumulate must be a whole number of micro-batches from 1 and is {accumulate!r}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise StepError(f"scaler must be an hs.GradScaler and is {type(scaler).__name__}; build hs.GradScaler(...)")
    if not isinstance(optimizer, Optimizer):
        raise StepError(f"optimizer must be a torch optimizer and is {type(optimizer).__name__}")
    if inspect.signature(optimizer.step).parameters.get("closure", NOTHING).default is inspect.Parameter.empty:
        raise StepError(
            f"{type(optimizer).__name__} evaluates the loss itself, through a closure, and TrainStep hands it "
            "gradients; prepare the model with hs.prepare(model, optimizer, policy=...) in bf16 or fp32 and call "
            "optimizer.step(closure) yourself"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise StepError(
            "ReduceLROnPlateau needs a metric at each step; leave it out of TrainStep and call scheduler.step(metric) "
            "yourself after each evaluation"
        )
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise StepError("the scheduler belongs to another optimizer than the one this TrainStep steps")


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
