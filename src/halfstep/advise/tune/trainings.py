"""Trainings: runs of a task under a candidate, made within a time budget and never twice.

In: a task, a number of steps, and the runs that an earlier call has made. Out: `Run`s, plain values, which a search
keeps in its record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

import halfstep as hs
from halfstep.tasks import Task
from halfstep.tasks.candidates import Candidate
from halfstep.tasks.compare import evaluated, started, thinned
from halfstep.tasks.loops import Loop, make_loop
from halfstep.tasks.machine import generators_kept
from halfstep.tasks.measure import finite_mean
from halfstep.tasks.task import STEPS_OF_A_SEED

__all__ = ["Run", "Trainings", "error_line"]

LAST = 10
"""The last tenth of the steps is the end of a training, the first tenth its start, where the loss is compared."""

PATIENCE = 20
"""Steps in a row whose loss is not finite, after which a training is given up: a loss scale recovers within them."""

FAILURES = (RuntimeError, ValueError, NotImplementedError, MemoryError)
"""What a candidate may raise: a HalfstepError, a model that cannot run in a format, too little memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training, finished or given up.

    Attributes:
        policy: TOML of the policy; "" for fp32.
        compile: whether the loss function was compiled.
        measure: what `value` is, "metric" or "loss".
        steps: that it was to have.
        seed: of weights, batches and random numbers.
        start: the metric before training (of fp32 only, else nan), or the mean training loss over the first steps.
        value: the metric after training, or the mean training loss over the last steps; nan if not finite.
        losses: training loss, at most 200 points.
        skipped: steps that were not applied.
        seconds: that it took.
        stopped: why it ended early, "" if it did not.
    """

    policy: str
    compile: bool
    measure: str
    steps: int
    seed: int
    start: float
    value: float
    losses: tuple[float, ...]
    skipped: int
    seconds: float
    stopped: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Run:
        """Return the run that was written as JSON, in which null stands for nan."""
        plain = {f.name: values[f.name] for f in fields(cls)}
        losses = tuple(map(_number, plain["losses"]))
        return cls(**{**plain, "losses": losses, "start": _number(plain["start"]), "value": _number(plain["value"])})

    @property
    def key(self) -> tuple[object, ...]:
        """What a run is identified by."""
        return self.policy, self.compile, self.measure, self.steps, self.seed


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class Trainings:
    """Trains candidates with seeds; what it has trained before is returned as it was.

    Attributes:
        measure: what a run's value is, with its unit.
        by_metric: whether that is the task's metric; else the training loss.

    Args:
        task: what to train.
        device: device type.
        steps: of each training.
        by_metric: whether to end with the task's metric.
        runs: known ones.
        seconds: time for new ones.
        clock: seconds.
        on_run: called after each new one.
    """

    def __init__(
        self, task: Task, device: str, steps: int, *, by_metric: bool, runs: Sequence[Run], seconds: float,
        clock: Callable[[], float], on_run: Callable[[Run], None],
    ) -> None:  # fmt: skip
        self.task, self.device, self.steps, self.by_metric = task, device, steps, by_metric
        self.measure = task.metric_name if by_metric else "training loss"
        self.window = max(1, steps // LAST)
        self.clock, self.end, self.on_run = clock, clock() + seconds, on_run
        self._known = {run.key: run for run in runs}

    def __call__(self, candidate: Candidate, seed: int) -> Run | None:
        """Return the run of `candidate` with `seed`; None if it would not end in time."""
        key = self._key(candidate, seed)
        if (run := self._known.get(key)) is not None:
            return run
        alike = [r.seconds for r in self._known.values() if r.key[:-1] == key[:-1]]
        if max(alike, default=0.0) >= self.left():
            return None
        with generators_kept():
            run = self._known[key] = self._train(candidate, str(key[0]), seed)
        self.on_run(run)
        return run

    def has(self, candidate: Candidate, seed: int) -> bool:
        """Return whether the run is there already."""
        return self._key(candidate, seed) in self._known

    def _key(self, candidate: Candidate, seed: int) -> tuple[object, ...]:
        return _text(candidate.policy), candidate.compile, "metric" if self.by_metric else "loss", self.steps, seed

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - self.clock()

    def _train(self, candidate: Candidate, text: str, seed: int) -> Run:
        begun = self.clock()
        start = value = math.nan
        losses: list[float] = []
        skipped, stopped = 0, ""
        try:
            loop = make_loop(candidate, self.task, started(self.task, seed, self.device), self.steps)
            if self.by_metric and candidate.policy is None:
                start = evaluated(self.task, loop, seed)
            stopped = self._steps(loop, seed, losses)
            skipped = len(loop.skipped())
            if not stopped:
                value = evaluated(self.task, loop, seed) if self.by_metric else finite_mean(losses[-self.window :])
        except FAILURES as error:
            if candidate.policy is None:
                raise
            stopped = error_line(error)
        missing = [math.nan] * (self.steps - len(losses))  # every curve has the same points
        return Run(
            policy=text, compile=candidate.compile, measure="metric" if self.by_metric else "loss", steps=self.steps,
            seed=seed, start=start if self.by_metric else finite_mean(losses[: self.window]), value=value,
            losses=thinned([*losses, *missing]), skipped=skipped, seconds=self.clock() - begun, stopped=stopped,
        )  # fmt: skip

    def _steps(self, loop: Loop, seed: int, losses: list[float]) -> str:
        """Train, add the loss of each step to `losses`, and return why training was given up, "" if it was not."""
        for step in range(self.steps):
            batch = self.task.batch_on(self.device, seed, step)
            torch.manual_seed(STEPS_OF_A_SEED * seed + step)
            loop(batch)
            losses.append(float(loop.loss))
            if len(losses) >= PATIENCE and not any(map(math.isfinite, losses[-PATIENCE:])):
                return f"the loss of the {PATIENCE} steps up to step {step + 1} is not finite"
        return ""


@lru_cache(maxsize=256)
def _text(policy: hs.Policy | None) -> str:
    return "" if policy is None else policy.to_toml()


def error_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
