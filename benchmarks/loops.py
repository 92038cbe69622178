"""Training loops of torch alone and of halfstep, each as its documentation recommends and at its fastest.

A loop is a function (case, model) -> `Run`. Every one clips gradients at norm 1, steps torch's fused AdamW and sets
gradients to None. A GradScaler is there only where fp16 needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode

import halfstep as hs
from benchmarks.cases import Batch, Case
from benchmarks.stages import Stages
from halfstep.step.graphs import RECORDERS

CLIP = 1.0
FIRST_SCALE = 2.0**12  # of fp16: no case overflows at it, so that curves do not differ by steps that were skipped


class Absent(Exception):
    """A candidate cannot run here; the message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One candidate in training.

    Attributes:
        step: trains on one batch and returns the loss, detached.
        model: what it trains.
        holds: everything that keeps parameters and state.
        stages: watches its steps; None where forward and backward are compiled or captured as one.
    """

    step: Callable[[Batch], Tensor]
    model: nn.Module
    holds: tuple[object, ...] = field(repr=False)
    stages: Stages | None


def device_of(model: nn.Module) -> str:
    """Return the device type of a model."""
    return next(model.parameters()).device.type


def adamw(case: Case, model: nn.Module) -> torch.optim.AdamW:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=case.rate, fused=True)


def graphs_on_tape() -> None:
    """Let steps be captured on a CPU, to see that they run: on the recorder of the tests."""
    from tests.step.tape import TapeRecorder

    RECORDERS["cpu"] = TapeRecorder  # type: ignore[assignment]


# ------------------------------------------------------------------ torch


def fp32(case: Case, model: nn.Module) -> Run:
    """No mixed precision."""
    optimizer, parameters, stages = adamw(case, model), list(model.parameters()), Stages(device_of(model))
    loss_fn = stages.watched(case.loss_fn)

    def step(batch: Batch) -> Tensor:
        loss = loss_fn(model, *batch)
        loss.backward()
        clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Run(step=step, model=model, holds=(model, optimizer), stages=stages)


def amp(case: Case, model: nn.Module, *, dtype: torch.dtype | None = None, compile: str | None = None) -> Run:
    """torch.amp: autocast, GradScaler for fp16, clip_grad_norm_, fused AdamW.

    Args:
        case: what to train.
        model: its model.
        dtype: the low format; None: the case's.
        compile: the mode in which torch.compile makes one function of forward pass and loss; None: eager.
    """
    device, low = device_of(model), case.low if dtype is None else dtype
    optimizer, parameters, stages = adamw(case, model), list(model.parameters()), Stages(device)
    scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE) if low is torch.float16 else None
    loss_fn = case.loss_fn if compile else stages.watched(case.loss_fn)

    def forward(*batch: Tensor) -> Tensor:
        with torch.autocast(device, dtype=low):
            return loss_fn(model, *batch)

    if compile:
        forward = torch.compile(forward, fullgraph=True, mode=compile)

    def step(batch: Batch) -> Tensor:
        if compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = forward(*batch)
        if scaler is None:
            loss.backward()
            clip_grad_norm_(parameters, CLIP)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, CLIP)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Run(step=step, model=model, holds=(model, optimizer, scaler), stages=None if compile else stages)


class PassesThrough(TorchFunctionMode):
    """Does nothing: what torch takes for any function mode at all, and so the floor of a policy with rules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def amp_in_empty_mode(case: Case, model: nn.Module) -> Run:
    """torch.amp whose forward pass runs in a function mode that does nothing."""

    def loss(net: nn.Module, *batch: Tensor) -> Tensor:
        with PassesThrough():
            return case.loss_fn(net, *batch)

    return amp(replace(case, loss_fn=loss), model)


def low(case: Case, model: nn.Module) -> Run:
    """Forward and backward with everything low and no casts: what a step cannot be faster than, but for its tail."""
    model.to(case.low)
    stages = Stages(device_of(model))
    loss_fn = stages.watched(case.loss_fn)

    def step(batch: Batch) -> Tensor:
        loss = loss_fn(model, *(t.to(case.low) if t.is_floating_point() else t for t in batch))
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return Run(step=step, model=model, holds=(model,), stages=stages)


# ------------------------------------------------------------------ halfstep


def policy(case: Case, model: nn.Module, preset: str, **options: Any) -> Run:
    """hs.TrainStep under a preset in the case's format.

    Args:
        case: what to train.
        model: its model.
        preset: the policy's name.
        options: of TrainStep, such as ``compile=True``.

    Raises:
        Absent: this version's TrainStep lacks an option.
    """
    known = inspect.signature(hs.TrainStep).parameters
    for name in options:
        if name not in known:
            raise Absent(f"this version's TrainStep has no {name}=")
    rule = {"scale": hs.ScaleRule(init=FIRST_SCALE)} if case.dtype == "fp16" else {}
    stages = None if options else Stages(device_of(model))
    loss_fn = case.loss_fn if stages is None else stages.watched(case.loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate)  # TrainStep takes the fastest form itself
    train = hs.TrainStep(
        model,
        optimizer,
        loss_fn,
        policy=hs.Policy.of(preset, dtype=case.dtype, **rule),
        clip_norm=CLIP,
        **options,
    )
    return Run(step=lambda batch: train(*batch).loss, model=model, holds=(train,), stages=stages)


def linear_loss(case: Case, model: nn.Module, preset: str) -> Run:
    """hs.TrainStep with hs.linear_cross_entropy for the head and the loss.

    Raises:
        Absent: this version of halfstep has no such function.
    """
    if "linear_cross_entropy" not in hs.__all__:
        raise Absent("this version of halfstep has no linear_cross_entropy")
    if case.linear_loss is None:
        raise Absent(f"case {case.name} has no such loss")
    return policy(replace(case, loss_fn=case.linear_loss), model, preset)
