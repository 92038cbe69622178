"""Training loops that run in turns: plain fp32, torch.amp at its best, and halfstep's TrainStep."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import halfstep as hs
from halfstep.tasks.candidates import Candidate
from halfstep.tasks.task import STEPS_OF_A_SEED, Task
from halfstep.timing import Race, timed

FUSED = (Adam, AdamW, SGD, Adagrad)


class Loop(ABC):
    """One candidate in training. A call is one step on one batch; nothing else of it is timed.

    `loss` (detached in the call, unscaled) and `grad_norm` (before clipping) are 0-dim tensors of the last step; nan
    before the first step, and where a loop has no use for the norm. `state` holds parameters and optimizer state.
    """

    def __init__(self, model: nn.Module, scaler: Any, *state: object) -> None:
        self.model, self.scaler, self.state = model, scaler, state
        self.skips: list[Any] = []  # of each step, whether it was not applied
        self.loss = self.grad_norm = torch.tensor(torch.nan)

    @abstractmethod
    def __call__(self, batch: tuple[Any, ...]) -> None:
        """Train on one batch."""

    def region(self) -> AbstractContextManager[object]:
        """Return the region of the metric, in which it is computed in the precision of the training."""
        return nullcontext()

    def evaluate(self, task: Task) -> float:
        """Return the task's metric."""
        with self.region():
            return task.measured(self.model)

    def skipped(self) -> tuple[int, ...]:
        """Return which steps were not applied so far, counted from 0; waits for the device."""
        return tuple(step for step, skipped in enumerate(self.skips) if skipped)

    def scale(self) -> float:
        """Return the loss scale, 1.0 without scaling; waits for the device."""
        return float(self.scaler.get_scale())


class Training(Race):
    """A race whose rounds are steps: one of every loop on the same batch, with the same state of torch's generator.

    `on_step` is called after each step, not timed, with this race, the loop's label, the step's number and its seconds.
    """

    def __init__(
        self, task: Task, loops: Mapping[str, Loop], *, device: str, seed: int,
        clock: Callable[[], float] = time.perf_counter,
        on_step: OnStep = lambda training, label, number, seconds: None,
    ) -> None:  # fmt: skip
        super().__init__(self.step, seed=seed)
        self.task, self.loops, self.device, self.seed, self.clock = task, dict(loops), device, seed, clock
        self.losses: dict[str, list[Tensor]] = {label: [] for label in loops}
        self.batch: tuple[Any, ...] = ()
        self._number = -1  # of the round that the batch is of
        self._on_step = on_step

    def step(self, label: str, number: int) -> float:
        """Make step `number` of one loop; return its seconds."""
        if number != self._number:
            self.batch, self._number = self.task.batch_on(self.device, self.seed, number), number
        loop = self.loops[label]
        torch.manual_seed(STEPS_OF_A_SEED * self.seed + number)
        seconds = timed(lambda: loop(self.batch), self.device, self.clock)
        self.losses[label].append(loop.loss)
        self._on_step(self, label, number, seconds)
        return seconds

    def floats(self, label: str) -> list[float]:
        """Return the losses of a loop's steps on the host; waits for the device."""
        losses = [loss.detach().float() for loss in self.losses[label]]
        return torch.stack(losses).flatten().tolist() if losses else []


OnStep = Callable[[Training, str, int, float], None]


def make_loop(candidate: Candidate, task: Task, model: nn.Module, steps: int) -> Loop:
    """Return a loop that trains `model`, in place, as `candidate`."""
    if candidate.policy is not None:
        return PolicyLoop(candidate.policy, task, model, steps, compile=candidate.compile)
    return TorchLoop(hs.formats.DTYPES[candidate.dtype], task, model, steps)


def fused(optimizer: Optimizer) -> Optimizer:
    """Return the same optimizer in torch's fused form, if its class has one: the baselines are at their best."""
    if not isinstance(optimizer, FUSED) or any(group.get("foreach") is not None for group in optimizer.param_groups):
        return optimizer
    defaults = {**optimizer.defaults, "foreach": None, "fused": True}
    groups = [{**group, "foreach": None, "fused": True} for group in optimizer.param_groups]
    blank: Any = type(optimizer)
    if blank is AdamW:
        defaults.pop("decoupled_weight_decay", None)  # AdamW's mark on Adam, not an argument of AdamW
    made: Optimizer = blank(groups, **defaults)
    return made


class TorchLoop(Loop):
    """A loop of torch alone with the fastest options: fp32, or torch.amp as its documentation recommends."""

    def __init__(self, dtype: torch.dtype, task: Task, model: nn.Module, steps: int) -> None:
        self.optimizer, self.dtype = fused(task.optimizer(model)), dtype
        self.device = next(model.parameters()).device.type
        scaler = torch.amp.GradScaler(self.device, enabled=dtype is torch.float16)  # else its methods do nothing
        super().__init__(model, scaler, model, self.optimizer)
        self.loss_fn, self.clip_norm = task.loss_fn, task.clip_norm
        self.scheduler = task.scheduler and task.scheduler(self.optimizer, steps)
        self.parameters = list(model.parameters())

    def region(self) -> AbstractContextManager[object]:
        """Return the region of forward pass and metric: none in fp32, which is to cost nothing."""
        return nullcontext() if self.dtype is torch.float32 else torch.autocast(self.device, dtype=self.dtype)

    def __call__(self, batch: tuple[Any, ...]) -> None:
        """Train on one batch."""
        scaler, before = self.scaler, self.scale()
        with self.region():
            loss = self.loss_fn(self.model, *batch)
        self.loss = loss.detach()
        scaler.scale(loss).backward()
        if self.clip_norm is not None:
            scaler.unscale_(self.optimizer)
            self.grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        scaler.step(self.optimizer)
        scaler.update()
        self.skips.append(self.scale() < before)
        if self.scheduler is not None and not self.skips[-1]:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)


class PolicyLoop(Loop):
    """halfstep's TrainStep under one policy."""

    def __init__(self, policy: hs.Policy, task: Task, model: nn.Module, steps: int, *, compile: bool = False) -> None:
        optimizer = task.optimizer(model)
        scheduler = task.scheduler and task.scheduler(optimizer, steps)
        self.step = hs.TrainStep(
            model, optimizer, task.loss_fn, policy=policy, clip_norm=task.clip_norm, scheduler=scheduler,
            compile=compile,
        )  # fmt: skip
        super().__init__(self.step.model, self.step.scaler, self.step)

    def __call__(self, batch: tuple[Any, ...]) -> None:
        """Train on one batch."""
        result = self.step(*batch)
        self.loss, self.grad_norm = result.loss, result.grad_norm
        self.skips.append(result.skipped)
