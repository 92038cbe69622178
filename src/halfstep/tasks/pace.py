"""Pace: time and bytes of a step under each candidate, in turns beside fp32; no metric, and no long training."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from halfstep.tasks.candidates import AMP, FP32, Candidate
from halfstep.tasks.compare import started
from halfstep.tasks.loops import Loop, make_loop
from halfstep.tasks.machine import wait_for
from halfstep.tasks.measure import Ratio, SavedForBackward, paired_ratio, state_bytes
from halfstep.tasks.task import Task

__all__ = ["Pace", "PaceRow", "pace"]

LEAST, MOST = 5, 400  # rounds, whatever the time allows
WARM_UP = 2  # steps: allocations, and kernels built and chosen on first use
SLOW, SLOW_SECONDS = 6.0, 0.5  # a candidate whose step takes this many times fp32's, and this long, has no turns


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceRow:
    """Cost of a step of one candidate."""

    label: str  # the candidate
    milliseconds: float  # median time of a step
    to_fp32: Ratio | None  # paired ratio of step time to fp32's; None for fp32 itself, and for one left out of turns
    to_amp: Ratio | None  # the same to torch.amp's
    slow: float  # times fp32's step that its step took, if it was left out of turns for it, else 0.0
    state_bytes: int  # of parameters, buffers, optimizer state, precise weights and lasting gradient buffers
    saved_bytes: int  # kept by autograd between forward and backward of one step, parameters excepted


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Steps of one task under every candidate."""

    task: str  # its name
    about: str  # model and data in one line
    parameters: int
    device: str  # the device type everything ran on
    control: Ratio  # fp32 over fp32: the ratio of identical programs on this machine
    rows: tuple[PaceRow, ...]  # one a candidate, fp32 and torch.amp first


def pace(
    task: Task, candidates: Sequence[Candidate], *, device: str, seconds: float,
    on_share: Callable[[float], None] = lambda share: None, clock: Callable[[], float] = time.perf_counter,
) -> Pace:  # fmt: skip
    """Time steps of every candidate in turns, in an order shuffled each round; count bytes in the step before.

    fp32 runs twice: what the two differ by is what cannot be resolved.

    Args:
        task: what to train; it needs no metric.
        candidates: from `candidates()`: fp32 and torch.amp first.
        device: device type to train on.
        seconds: how long to time, at least for `LEAST` rounds.
        on_share: called with the share that is done, from 0 to 1.
        clock: seconds, from any start.
    """
    saved = _Counted(task)
    model = started(task, 0, device)
    twin = Candidate(label=f"{FP32} again", dtype=FP32)
    loops = {c.label: make_loop(c, saved.task, copy.deepcopy(model), MOST) for c in (*candidates, twin)}

    def step(loop: Loop, number: int) -> float:
        batch = task.batch_on(device, 0, number)
        wait_for(device)
        start = clock()
        loop(batch)
        wait_for(device)
        return clock() - start

    slow: dict[str, float] = {}
    bytes_of: dict[str, tuple[int, int]] = {}
    reference = 0.0
    for label, loop in loops.items():
        for number in range(WARM_UP):
            taken = step(loop, number)
            if taken > SLOW * reference > 0.0:
                break  # without units a step can take a hundred times fp32's: one is enough
        saved.counting = True
        taken = step(loop, WARM_UP)
        saved.counting = False
        bytes_of[label] = (state_bytes(*loop.state()), saved.bytes)
        reference = reference or taken
        if taken > max(SLOW * reference, SLOW_SECONDS):
            slow[label] = taken / reference
    for label in slow:
        loops.pop(label)
    times = _in_turns(loops, step, seconds, on_share, clock)

    def ratio(label: str, baseline: str) -> Ratio | None:
        timed = label != baseline and label in times and baseline in times
        return paired_ratio(times[label], times[baseline]) if timed else None

    amp = next(c.label for c in candidates if c.label.startswith(AMP))
    rows = tuple(
        PaceRow(
            label=c.label,
            milliseconds=1e3 * statistics.median(times[c.label]) if c.label in times else float("nan"),
            to_fp32=ratio(c.label, FP32),
            to_amp=ratio(c.label, amp),
            slow=slow.get(c.label, 0.0),
            state_bytes=bytes_of[c.label][0],
            saved_bytes=bytes_of[c.label][1],
        )
        for c in candidates
    )
    return Pace(
        task=task.name, about=task.about, parameters=sum(p.numel() for p in model.parameters()), device=device,
        control=paired_ratio(times[twin.label], times[FP32]), rows=rows,
    )  # fmt: skip


def _in_turns(
    loops: dict[str, Loop], step: Callable[[Loop, int], float], seconds: float, on_share: Callable[[float], None],
    clock: Callable[[], float],
) -> dict[str, list[float]]:  # fmt: skip
    """Return the times of every loop's steps, one a round."""
    times: dict[str, list[float]] = {label: [] for label in loops}
    order = list(loops)
    shuffle = random.Random(0)
    begin = clock()
    for number in range(MOST):
        gone = (clock() - begin) / seconds if seconds else 1.0
        on_share(min(1.0, gone))
        if number >= LEAST and gone >= 1.0:
            break
        shuffle.shuffle(order)
        for label in order:
            times[label].append(step(loops[label], number))
    return times


class _Counted:
    """A task whose loss function counts what autograd keeps while `counting` is set."""

    def __init__(self, task: Task) -> None:
        self.counting = False
        self.bytes = 0
        self._loss_fn = task.loss_fn
        self.task = replace(task, loss_fn=self._loss)

    def _loss(self, model: nn.Module, *batch: Any) -> torch.Tensor:
        if not self.counting:
            return self._loss_fn(model, *batch)  # type: ignore[no-any-return]  # a task's own function
        with SavedForBackward(model) as kept:
            loss = self._loss_fn(model, *batch)
        self.bytes = kept.bytes
        return loss  # type: ignore[no-any-return]
