"""Race: candidates and fp32 train in turns from the same weights on the same batches; each step is timed.

A round is one step of every candidate still in the race, in an order shuffled anew, with the same batch and the same
random numbers. fp32 runs twice: what the two differ by cannot be resolved here. A candidate that raises, runs out of
memory, or is clearly slower than the race is for leaves it, and the others go on.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.advise.tune.result import TuneError
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.tasks.compare import WARM_UP, started
from halfstep.tasks.images import STEPS_OF_A_SEED
from halfstep.tasks.loops import Loop, make_loop
from halfstep.tasks.machine import wait_for
from halfstep.tasks.measure import Ratio, paired_ratio
from halfstep.tasks.task import Task

__all__ = ["BASELINE", "Lap", "Race", "error_line", "race"]

BASELINE = Candidate(label=FP32, dtype="fp32")
TWIN = Candidate(label="fp32 again", dtype="fp32")

LAST = 10
"""The last tenth of the steps is the end of a training, the first tenth its start."""

LOOK = 8
"""Timed rounds before a candidate may be dropped, and between two looks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """What one candidate did in a race; plain values.

    Attributes:
        label: the candidate.
        time: its step time over fp32's in the same rounds; None if no round was timed.
        beside: its step time over that of the race's base in the same rounds.
        milliseconds: median time of a step.
        start: mean training loss over the first tenth of the steps; nan if not finite.
        end: over the last tenth; nan if not finite, or if it left the race before.
        skipped: steps that were not applied.
        dropped: whether it left because it was clearly slower.
        failed: the error that it left with, "" for none.
    """

    label: str
    time: Ratio | None = None
    beside: Ratio | None = None
    milliseconds: float = math.nan
    start: float = math.nan
    end: float = math.nan
    skipped: int = 0
    dropped: bool = False
    failed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """The laps of a race by label, fp32's among them; plain values.

    Attributes:
        laps: label -> lap.
        control: fp32 over fp32; None if no round was timed.
        repeatable: whether the two had the same loss in every step.
        finished: whether it was run to its last step; a race that the clock ended was not.
    """

    laps: Mapping[str, Lap]
    control: Ratio | None
    repeatable: bool
    finished: bool

    def rise(self, label: str) -> float:
        """Return how much higher than fp32's a loss ends, as a fraction of it; inf if not finite, nan if unknown."""
        lap, fp32 = self.laps[label], self.laps[FP32]
        if lap.failed or lap.dropped or not self.finished:
            return math.nan
        if math.isnan(lap.end):
            return math.inf
        return (lap.end - fp32.end) / abs(fp32.end) if fp32.end else math.nan

    @property
    def resolution(self) -> float:
        """How far from 1 a ratio of identical programs may lie."""
        return 0.0 if self.control is None else max(abs(self.control.low - 1.0), abs(self.control.high - 1.0))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Race:
        """Return what `dataclasses.asdict` made plain."""
        laps = {
            label: Lap(**{**lap, "time": _ratio(lap["time"]), "beside": _ratio(lap["beside"])})
            for label, lap in values["laps"].items()
        }
        return cls(**{**values, "laps": laps, "control": _ratio(values["control"])})


def _ratio(values: Mapping[str, Any] | None) -> Ratio | None:
    return None if values is None else Ratio(**values)


@dataclass
class _Runner:
    """A candidate in a race."""

    candidate: Candidate
    loop: Loop | None = None
    times: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    skipped: int = 0
    dropped: bool = False
    failed: str = ""

    def leave(self) -> None:
        """Give its memory back."""
        self.loop = None
        gc.collect()
        if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
            getattr(torch.get_device_module(device), "empty_cache", int)()


def race(
    task: Task, candidates: Sequence[Candidate], *, device: str, seed: int, steps: int, base: str = FP32,
    limit: float = math.inf, deadline: float = math.inf, clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[int], None] = lambda done: None,
) -> Race:  # fmt: skip
    """Race `candidates` over `steps` steps.

    Args:
        task: what to train.
        candidates: without fp32, which always runs.
        device: device type.
        seed: of weights, batches and random numbers.
        steps: of each training.
        base: label of the candidate that `Lap.beside` and `limit` refer to.
        limit: a candidate leaves when its step time is, for certain, more than this many times that of `base`.
        deadline: value of `clock` after which no round begins.
        clock: seconds.
        on_round: called after each round.

    Raises:
        TuneError: fp32 raised, or ran out of memory.
    """
    model = started(task, seed, device)
    runners = [_Runner(candidate) for candidate in (BASELINE, TWIN, *candidates)]
    for runner in runners:
        _attempt(runner, _enter, task, model, steps)
    del model
    by_label = {runner.candidate.label: runner for runner in runners}
    shuffle, order = random.Random(seed), list(runners)
    done = 0
    while done < steps and clock() < deadline:
        batch = task.batch_on(device, seed, done)
        shuffle.shuffle(order)
        for runner in order:
            if runner.loop is not None:
                torch.manual_seed(STEPS_OF_A_SEED * seed + done)
                _attempt(runner, _step, batch, device, clock, done >= WARM_UP)
        done += 1
        if done >= WARM_UP + LOOK and (done - WARM_UP) % LOOK == 0:
            _drop(runners, by_label[base], limit)
        on_round(done)
        if candidates and not any(runner.loop for runner in runners[2:]):
            break
    finished = done == steps
    laps = {r.candidate.label: _lap(r, by_label, base, steps) for r in runners if r is not runners[1]}
    fp32, twin = runners[:2]
    return Race(
        laps=laps,
        control=paired_ratio(twin.times, fp32.times) if fp32.times else None,
        repeatable=[repr(x) for x in _floats(fp32)] == [repr(x) for x in _floats(twin)],
        finished=finished,
    )


def _attempt(runner: _Runner, work: Callable[..., None], *arguments: Any) -> None:
    """Do a candidate's work; what it raises is a fact about it, unless it is fp32."""
    try:
        work(runner, *arguments)
    except Exception as error:  # of the user's model, of torch, or no memory
        if runner.candidate in (BASELINE, TWIN):
            raise TuneError(
                f"the task does not train in fp32, with which everything is compared: {error_line(error)}"
            ) from error
        runner.failed = error_line(error)
        runner.leave()


def error_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")


def _enter(runner: _Runner, task: Task, model: nn.Module, steps: int) -> None:
    runner.loop = make_loop(runner.candidate, task, copy.deepcopy(model), steps)


def _step(runner: _Runner, batch: tuple[Any, ...], device: str, clock: Callable[[], float], timed: bool) -> None:
    assert runner.loop is not None
    wait_for(device)
    start = clock()
    runner.loop(batch)
    wait_for(device)
    seconds = clock() - start
    if timed:
        runner.times.append(seconds)
    runner.losses.append(runner.loop.loss)  # read when the race is over


def _drop(runners: Sequence[_Runner], base: _Runner, limit: float) -> None:
    for runner in runners[2:]:
        if runner.loop is None or runner is base or base.loop is None:
            continue
        if paired_ratio(runner.times, base.times).low > limit:
            runner.dropped = True
            runner.leave()


def _floats(runner: _Runner) -> list[float]:
    return torch.stack([x.detach().float().cpu() for x in runner.losses]).flatten().tolist() if runner.losses else []


def _lap(runner: _Runner, by_label: Mapping[str, _Runner], base: str, steps: int) -> Lap:
    losses, window = _floats(runner), max(1, steps // LAST)
    count = len(runner.times)

    def over(label: str) -> Ratio | None:
        other = by_label[label].times
        shared = min(count, len(other))
        return paired_ratio(runner.times[:shared], other[:shared]) if shared else None

    return Lap(
        label=runner.candidate.label, time=over(FP32), beside=over(base),
        milliseconds=1e3 * statistics.median(runner.times) if count else math.nan,
        start=_mean(losses[:window]), end=_mean(losses[-window:]) if len(losses) == steps else math.nan,
        skipped=len(runner.loop.skipped()) if runner.loop is not None else 0,
        dropped=runner.dropped, failed=runner.failed,
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values and all(map(math.isfinite, values)) else math.nan
