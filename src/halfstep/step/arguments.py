"""What a training step can be made of, checked before anything is changed."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep.arguments import CALLABLE, COUNT, FLAG, MODEL, NONE, PATH, POSITIVE, WHOLE, Kind, a, check, one_of, shown
from halfstep.auto.choose import Choice
from halfstep.binding.wrappers import unwrap_optimizer
from halfstep.errors import CheckpointError, StepError
from halfstep.optim import Optimizers, Schedulers, members
from halfstep.policy.policy import Policy
from halfstep.scale.scaler import GradScaler
from halfstep.torch_private.distributed import overlaps_with_ddp
from halfstep.update.updater import ClipNorm, check_rates

LOSS = Kind("callable as loss_fn(model, *batch)", CALLABLE.has)
EVIDENCE = Kind("a folder for evidence files", PATH.has)
ATTEMPTS = FLAG | Kind("the most attempts, a whole number from 0,", WHOLE.has)

ENOUGH = 16
"""Attempts of ``retry=True``: as many halvings as lead from 2**16, where most scales begin, to 1."""

TWICE = "two passes"
"""Of `update_in_backward`: a backward pass for the norm of all gradients, then one that updates."""

NOTHING = inspect.Parameter("closure", inspect.Parameter.KEYWORD_ONLY, default=None)

CRITERIA = ("torch.nn.functional", "torch.nn.modules.loss")
"""Where torch's losses are defined: they take outputs and targets."""


@dataclass(kw_only=True)
class Given:
    """The arguments of a training step as they are now, checked; `TrainStep` describes them."""

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Callable[..., Any]
    policy: Policy | str | Path | None
    clip_norm: ClipNorm
    clip_value: float | None
    accumulate: int
    scaler: GradScaler | None
    scheduler: Any  # an LRScheduler, or an object with its methods; None: none
    compile: bool | Mapping[str, Any] | None
    cuda_graph: bool
    blackbox: bool | str | Path
    retry: int  # how often a window runs again, 0 for False
    update_in_backward: bool | str
    state: str
    evidence: Path | None = None  # the folder that `blackbox` names
    choice: Choice | None = None  # what policy="auto" has chosen

    def __post_init__(self) -> None:
        self.optimizer = unwrap_optimizer(self.optimizer)
        check("TrainStep", StepError, model=(self.model, MODEL))
        check_loss_function(self.loss_fn)
        check(
            "TrainStep",
            StepError,
            accumulate=(self.accumulate, COUNT),
            cuda_graph=(self.cuda_graph, FLAG),
            scaler=(self.scaler, a(GradScaler, words="an hs.GradScaler") | NONE),
            update_in_backward=(self.update_in_backward, FLAG | Kind(repr(TWICE), lambda value: value == TWICE)),
            state=(self.state, one_of("device", "host")),
            blackbox=(self.blackbox, FLAG | EVIDENCE),
            retry=(self.retry, ATTEMPTS),
        )
        self.scheduler = one_scheduler(self.scheduler, check_optimizer(self.optimizer))
        self.clip_norm = norm_limit(self.clip_norm, self.optimizer)
        self.clip_value = limit("clip_value", self.clip_value)
        self.accumulate = int(self.accumulate)
        if not isinstance(self.blackbox, bool):
            self.evidence = Path(self.blackbox)
        if self.retry and self.cuda_graph:
            raise StepError(
                f"retry={self.retry!r}: the host must read each verdict to run a window again, and a CUDA graph makes "
                "the update and moves the scale without it; leave out retry or cuda_graph"
            )
        if self.state == "host" and self.cuda_graph:
            raise StepError("state='host': cuda_graph=True has the addresses of one update; leave out one of the two")
        self.retry = ENOUGH if self.retry is True else int(self.retry)


def check_loss_function(loss_fn: object) -> None:
    """Refuse what is no loss function of a training step."""
    check("TrainStep", StepError, loss_fn=(loss_fn, LOSS))
    if getattr(loss_fn, "__module__", None) in CRITERIA:
        name = getattr(loss_fn, "__name__", None)
        raise StepError(
            f"loss_fn is called as loss_fn(model, *batch) and is {name or type(loss_fn).__name__}, which takes no "
            f"model; give lambda model, x, y: {f'F.{name}' if name else 'criterion'}(model(x), y)"
        )


def check_optimizer(optimizer: object) -> Optimizer:
    """Refuse what no training step can step; return it."""
    if isinstance(optimizer, Optimizers):
        for one in members(optimizer):
            check_optimizer(one)
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise StepError(f"optimizer must be a torch optimizer, or a list or a dict of some, and is {shown(optimizer)}")
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
    """Refuse what no checkpoint can be made of, or loaded into."""
    is_step = hasattr(type(step), "run_backward") and hasattr(type(step), "load_state_dict")
    first = Kind("an hs.TrainStep", lambda _: is_step)
    check(where, CheckpointError, step=(step, first), path=(path, PATH), keep=(keep, COUNT | NONE))


def limit(name: str, value: Any) -> float | None:
    """Return a limit of gradients, given as any real number or a tensor of one element, as a float; None for none."""
    if value is None:
        return None
    given = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool:
        given = value.item()
    check("TrainStep", StepError, **{name: (given, POSITIVE | NONE)})
    return float(given)


def norm_limit(value: Any, optimizer: Optimizer | None) -> ClipNorm:
    """Return the largest norm of all gradients, or those of some of several optimizers by name."""
    if not isinstance(value, Mapping):
        return limit("clip_norm", value)
    names = [*optimizer.optimizers] if isinstance(optimizer, Optimizers) else []
    if unknown := [name for name in value if name not in names]:
        here = f"is none of {', '.join(map(repr, names))}" if names else "names one, and there are not several"
        raise StepError(f"clip_norm: {unknown[0]!r} is to be the name of an optimizer and {here}")
    return {name: number for name, one in value.items() if (number := limit("clip_norm", one)) is not None}


def one_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    """Return `scheduler`, or one that advances those of a list; refuse what `check_scheduler` refuses."""
    if not isinstance(scheduler, (list, tuple)):
        check_scheduler(scheduler, optimizer)
        return scheduler
    for one in scheduler:
        check_scheduler(one, optimizer)
    return Schedulers(scheduler) if scheduler else None


def check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    """Refuse what is no scheduler of `optimizer` that a training step can advance; None is none."""
    if scheduler is None:
        return
    methods = [getattr(scheduler, name, None) for name in ("step", "state_dict", "load_state_dict")]
    if isinstance(scheduler, (type, Optimizer)) or not all(callable(method) for method in methods):
        raise StepError(
            f"scheduler must be a learning-rate scheduler, an object with step(), state_dict() and load_state_dict(), "
            f"and is {shown(scheduler)}; build one, such as torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, "
            "T_max=...)"
        )
    taken = inspect.signature(scheduler.step).parameters.values()  # type: ignore[attr-defined]
    needed = [p.name for p in taken if p.default is p.empty and p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    if isinstance(scheduler, ReduceLROnPlateau) or needed:
        what = "a metric" if isinstance(scheduler, ReduceLROnPlateau) else " and ".join(map(repr, needed))
        raise StepError(
            f"{type(scheduler).__name__} needs {what} at each step; leave it out of TrainStep and call "
            "scheduler.step(metric) yourself after each evaluation"
        )
    if getattr(scheduler, "optimizer", optimizer) not in (optimizer, *members(optimizer)):
        raise StepError("the scheduler belongs to another optimizer than the one this TrainStep steps")
