"""Race: candidates and fp32 train in turns from the same weights on the same batches; each step is timed.

A round is one step of every candidate still in the race (`Training`). fp32 runs twice: what the two differ by cannot be
resolved here. Where its loss is known already, both leave after `LOOKS` timed rounds, and the base of the race too,
whose loss was judged before. A candidate that raises, runs out of memory, or is clearly slower than the race is for
leaves it, and the others go on.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfstep.advise.tune.proof import BASELINE, LAST, error_line
from halfstep.advise.tune.result import TuneError
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.tasks.compare import started
from halfstep.tasks.loops import Training, make_loop
from halfstep.tasks.measure import finite_mean, student_quantile
from halfstep.tasks.task import Task
from halfstep.timing import WARM_UP, Ratio, Unfit

TWIN = Candidate(label="fp32 again", dtype="fp32")

LOOKS = 24  # timed rounds that show what a candidate costs
LOOK = 8  # timed rounds before a candidate may be dropped, and between two looks


@dataclass(frozen=True, kw_only=True, slots=True)
class Lap:
    """What one candidate did in a race; plain values."""

    label: str
    time: Ratio | None = None  # its step time over fp32's in the same rounds; None if no round was timed
    beside: Ratio | None = None  # its step time over that of the race's base in the same rounds
    milliseconds: float = math.nan  # median time of a step
    start: float = math.nan  # mean training loss over the first tenth of the steps; nan if not finite
    end: float = math.nan  # over the last tenth; nan if not finite, or if it left the race before
    skipped: int = 0  # steps that were not applied
    dropped: bool = False  # whether it left because it was clearly slower
    failed: str = ""  # the error that it left with, "" for none


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceResult:
    """The laps of a race by label, fp32's among them; plain values."""

    laps: Mapping[str, Lap]
    control: Ratio | None  # fp32 over fp32; None if no round was timed
    repeatable: bool  # whether the two had the same loss in every step
    finished: bool  # whether it was run to its last step; a race that the clock ended was not

    def rise(self, label: str) -> float:
        """Return how much higher than fp32's a loss ends, as a fraction of it; inf if not finite, nan if unknown."""
        lap, fp32 = self.laps[label], self.laps[FP32]
        if lap.failed or lap.dropped or not self.finished:
            return math.nan
        if math.isnan(lap.end):
            return math.inf
        return (lap.end - fp32.end) / abs(fp32.end) if fp32.end else math.nan

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RaceResult:
        """Return what `dataclasses.asdict` made plain."""

        def ratio(found: Mapping[str, Any] | None) -> Ratio | None:
            return None if found is None else Ratio(**found)

        laps = {
            label: Lap(**{**lap, "time": ratio(lap["time"]), "beside": ratio(lap["beside"])})
            for label, lap in values["laps"].items()
        }
        return cls(**{**values, "laps": laps, "control": ratio(values["control"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """fp32's short trainings, one a seed."""

    start: tuple[float, ...]  # mean training loss over the first steps, one a seed
    end: tuple[float, ...]  # over the last steps

    @property
    def noise(self) -> float:
        """Standard deviation of the end from seed to seed, as a fraction of its mean."""
        mean = abs(statistics.fmean(self.end))
        return statistics.stdev(self.end) / mean if mean else math.inf

    @property
    def finite(self) -> bool:
        """Whether all losses are."""
        return all(map(math.isfinite, (*self.start, *self.end)))

    def flaw(self, bound: float | None) -> str:
        """Return why no loss can be compared with these, "" if it can.

        The loss has to fall by a one-sided t test at the 5 % level, and by more than the bound lets it rise: else a
        policy that learns nothing could pass.
        """
        if not self.finite:
            return (
                "the loss of fp32 is not finite; no precision helps: lower the learning rate, or look at the data "
                "(hs.TrainStep(...).explain() names the operator)"
            )
        falls = [a - b for a, b in zip(self.start, self.end, strict=True)]
        mean, error = statistics.fmean(falls), statistics.stdev(falls) / math.sqrt(len(falls))
        shown = ", ".join(f"{a:.4g} -> {b:.4g}" for a, b in zip(self.start, self.end, strict=True))
        if not mean > student_quantile(0.95, len(falls) - 1) * error:
            return (
                f"the loss does not fall in fp32 ({shown}, one a seed), so that no policy can be judged by it; train "
                "longer (excerpt_steps), raise the learning rate, or look at the task"
            )
        allowed = (self.noise if bound is None else bound) * abs(statistics.fmean(self.end))
        if not mean > allowed:
            return (
                f"the loss falls by {mean:.3g} in fp32 ({shown}, one a seed), and a rise by {allowed:.3g} would be "
                "allowed, so that a policy that learns nothing could pass; train longer (excerpt_steps), or give a "
                "smaller max_loss_rise"
            )
        return ""


class _Race(Training):
    def step(self, label: str, number: int) -> float:
        with failing(label):
            return super().step(label, number)

    def leave(self) -> None:
        if gone := self.loops.keys() & self.dropped.keys():
            for label in gone:
                del self.loops[label]
            gc.collect()
            if self.device != "cpu":
                torch.accelerator.empty_cache()


@contextmanager
def failing(label: str) -> Iterator[None]:
    """What a candidate raises in the block makes it `Unfit`, unless it is fp32."""
    try:
        yield
    except Exception as error:  # of the user's model, of torch, or no memory
        if label in {BASELINE.label, TWIN.label}:
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            raise TuneError(
                f"the task does not train in fp32, with which everything is compared: {error_line(error)}"
            ) from error
        raise Unfit(error_line(error)) from error


def race(
    task: Task, candidates: Sequence[Candidate], *, device: str, seed: int, steps: int, base: str = FP32,
    limit: float = math.inf, deadline: float = math.inf, known: tuple[float, float] | None = None,
    clock: Callable[[], float] = time.perf_counter, on_round: Callable[[int], None] = lambda done: None,
) -> RaceResult:  # fmt: skip
    """Race `candidates` over `steps` steps, beside fp32; `known`: (start, end) of its loss in a race of this length.

    A candidate leaves when its step time is, for certain, more than `limit` times that of the candidate called `base`;
    no round begins after `deadline`, a value of `clock`; `on_round` is given the number of rounds.
    """
    model = started(task, seed, device)
    running = _Race(task, {}, device=device, seed=seed, clock=clock)
    labels = [candidate.label for candidate in (BASELINE, TWIN, *candidates)]
    for candidate in (BASELINE, TWIN, *candidates):
        running.losses[candidate.label] = []
        try:
            with failing(candidate.label):
                running.loops[candidate.label] = make_loop(candidate, task, copy.deepcopy(model), steps)
        except Unfit as reason:
            running.dropped[candidate.label] = str(reason)
    del model
    done = 0
    while done < steps and clock() < deadline:
        running.round(labels, done, timed=done >= WARM_UP)
        done += 1
        if done >= WARM_UP + LOOK and (done - WARM_UP) % LOOK == 0:
            there = {label for label in labels[2:] if label != base and {label, base}.isdisjoint(running.dropped)}
            ratios = ((label, running.ratio(label, base)) for label in there)
            slower = [label for label, ratio in ratios if ratio is not None and ratio.low > limit]
            running.dropped |= dict.fromkeys(slower, "")
        if done == WARM_UP + LOOKS < steps and known is not None:
            running.dropped |= dict.fromkeys({*labels[:2], base}, "")
        running.leave()
        on_round(done)
        if candidates and not running.loops.keys() - {*labels[:2]}:
            break
    laps = {label: _lap(running, label, base, steps) for label in labels if label != TWIN.label}
    if known is not None:
        laps[FP32] = replace(laps[FP32], start=known[0], end=known[1], dropped=False)
    alike = repr(running.floats(FP32)) == repr(running.floats(TWIN.label))
    control = running.ratio(TWIN.label, FP32)
    return RaceResult(laps=laps, control=control, repeatable=alike, finished=done == steps)


def _lap(running: Training, label: str, base: str, steps: int) -> Lap:
    losses, window = running.floats(label), max(1, steps // LAST)
    loop = running.loops.get(label)
    return Lap(
        label=label, time=running.ratio(label, FP32), beside=running.ratio(label, base),
        milliseconds=1e3 * running.typical(label),
        start=finite_mean(losses[:window]), end=finite_mean(losses[-window:]) if len(losses) == steps else math.nan,
        skipped=0 if loop is None else len(loop.skipped()),
        dropped=running.dropped.get(label) == "", failed=running.dropped.get(label, ""),
    )  # fmt: skip
