"""Compare: train every candidate from the same weights on the same batches, in turns; measure result and cost."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import halfstep as hs
from halfstep.tasks.candidates import AMP, FP32, Candidate
from halfstep.tasks.loops import Loop, Training, make_loop
from halfstep.tasks.measure import Difference, SavedForBackward, difference, finite_mean, state_bytes
from halfstep.tasks.task import Task
from halfstep.timing import WARM_UP, Ratio, paired_ratio, timed
from halfstep.torch_private.trees import tree_leaves

__all__ = ["CandidateRow", "Comparison", "Moment", "check", "compare", "evaluated", "probed", "started", "thinned"]

CURVE_POINTS = 200  # of a loss curve, at most: more than a picture shows
PROBE_STEPS = 2  # the first makes optimizer state and buffers, the second is counted and timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Progress of a comparison after a step of one candidate. Reading `loop` is not timed."""

    seed: int  # of the run, from 0
    step: int  # of the run, from 1
    label: str  # the candidate
    loop: Loop  # its training loop, to be read, not to be changed
    samples_per_second: float  # of this step
    last: bool  # whether this was the last step of this seed's runs


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRow:
    """Result and cost of one candidate."""

    label: str  # the candidate
    policy: str  # its policy as TOML, "" for loops of torch alone
    notes: tuple[str, ...]  # those of its plan, such as how fp16 runs on a device without fp16 units
    metrics: tuple[float, ...]  # final metric, one a seed
    difference: Difference  # of the metric from fp32's, paired by seed
    milliseconds: float  # median time of a step
    to_fp32: Ratio | None  # paired ratio of step time to fp32's; None for fp32 itself, or if no step was timed
    to_amp: Ratio | None  # paired ratio of step time to torch.amp's; None for torch.amp itself
    state_bytes: int  # of parameters, buffers, optimizer state, precise weights and lasting gradient buffers
    saved_bytes: int  # kept by autograd between forward and backward of one step, parameters excepted
    skipped: tuple[int, ...]  # steps not applied, one number a seed
    skipped_steps: tuple[tuple[int, ...], ...]  # which those were, counted from 0, one list a seed
    scale: tuple[float, ...]  # loss scale at the end, one number a seed
    # training loss, the mean over the seeds and over the steps that the comparison's `loss_steps` stand for, to six
    # digits; nan where it was not finite. Every candidate sees the same batches, so curves can be subtracted
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One task, trained by every candidate."""

    task: str  # its name
    about: str  # model and data in one line
    metric: str  # what the metric is, with its unit
    higher_is_better: bool  # whether a larger metric is a better one
    margin: float  # the margin within which a metric counts as equal to fp32's, in the metric's unit
    device: str  # the device type everything ran on
    steps: int  # of each run
    seeds: tuple[int, ...]  # of the runs
    # where the points of each row's `losses` lie, counted from 1: the middles of groups of consecutive steps, as large
    # as it takes to have no more than 200 points
    loss_steps: tuple[float, ...]
    # torch.amp over torch.amp: the ratio of identical programs on this machine; None if nothing was timed
    control: Ratio | None
    repeatable: bool  # whether those two identical runs ended with the same metric, bit for bit, with every seed
    rows: tuple[CandidateRow, ...]  # one a candidate, fp32 and torch.amp first


def check(task: Task, candidates: Sequence[Candidate], device: str) -> None:
    """Bind every candidate to the task's model once, so that errors are raised before anything is trained.

    Raises:
        HalfstepError: a policy cannot be bound to this model, or the task has no metric.
    """
    task.margin_around(0.0)
    model = started(task, 0, device)
    for candidate in candidates:
        make_loop(candidate, task, copy.deepcopy(model), 1)


def compare(
    task: Task, candidates: Sequence[Candidate], *, steps: int, seeds: int, device: str = "cpu",
    on_step: Callable[[Moment], None] = lambda moment: None,
) -> Comparison:  # fmt: skip
    """Train and measure.

    Candidates train in turns (`Training`). torch.amp runs twice: what the two differ by is what cannot be resolved.

    Args:
        task: what to train.
        candidates: from `candidates()`: fp32 and torch.amp first.
        steps: of each run.
        seeds: how many runs of each candidate, with seeds from 0.
        device: device type to train on.
        on_step: called after every step of every candidate.

    Raises:
        HalfstepError: a policy cannot be bound to this model.
    """
    amp = next(c for c in candidates if c.label.startswith(AMP))
    twin = Candidate(label=f"{amp.label} again", dtype=amp.dtype)
    runners = [*candidates, twin]
    bytes_of = {c.label: probed(task, c, device) for c in candidates}
    times: dict[str, list[float]] = {c.label: [] for c in runners}
    ends: dict[str, list[tuple[float, tuple[int, ...], float]]] = {c.label: [] for c in runners}
    curves: dict[str, list[list[float]]] = {c.label: [] for c in runners}
    for seed in range(seeds):
        model = started(task, seed, device)
        loops = {c.label: make_loop(c, task, copy.deepcopy(model), steps) for c in runners}
        training = _Training(task, loops, device=device, seed=seed)
        training.on_step, training.steps = on_step, steps
        for step in range(steps):
            training.round(loops, step, timed=step >= WARM_UP)
        for label, loop in loops.items():
            times[label] += training.times.get(label, {}).values()
            curves[label].append(training.floats(label))
            ends[label].append((evaluated(task, loop, seed), loop.skipped(), loop.scale()))
    reference = [metric for metric, _, _ in ends[FP32]]
    margin = task.margin_around(statistics.fmean(reference))

    def ratio(label: str, baseline: str) -> Ratio | None:
        return paired_ratio(times[label], times[baseline]) if label != baseline and times[label] else None

    rows = []
    for candidate in candidates:
        label = candidate.label
        metrics, skipped_steps, scales = (tuple(column) for column in zip(*ends[label], strict=True))
        rows.append(
            CandidateRow(
                label=label,
                policy="" if candidate.policy is None else candidate.policy.to_toml(),
                notes=() if candidate.policy is None else hs.resolve(candidate.policy, started(task, 0, device)).notes,
                metrics=metrics,
                difference=difference(metrics, reference, margin, higher=task.higher_is_better),
                milliseconds=1e3 * statistics.median(times[label]) if times[label] else float("nan"),
                to_fp32=ratio(label, FP32),
                to_amp=ratio(label, amp.label),
                state_bytes=bytes_of[label].state_bytes,
                saved_bytes=bytes_of[label].saved_bytes,
                skipped=tuple(map(len, skipped_steps)),
                skipped_steps=skipped_steps,
                scale=scales,
                losses=thinned([finite_mean(values) for values in zip(*curves[label], strict=True)]),
            )
        )
    return Comparison(
        task=task.name,
        about=task.about,
        metric=task.metric_name,
        higher_is_better=task.higher_is_better,
        margin=margin,
        device=device,
        steps=steps,
        seeds=tuple(range(seeds)),
        loss_steps=thinned(range(1, steps + 1)),
        control=ratio(twin.label, amp.label),
        repeatable=[repr(e) for e in ends[twin.label]] == [repr(e) for e in ends[amp.label]],
        rows=tuple(rows),
    )


def thinned(values: Sequence[float]) -> tuple[float, ...]:
    """Return the means of consecutive values, as many to a mean as leave no more than `CURVE_POINTS`, to six digits.

    A mean in which a value is not finite is nan: a loss that overflowed is a gap in its curve, not a point.
    """
    width = math.ceil(len(values) / CURVE_POINTS)
    return tuple(float(f"{finite_mean(values[i : i + width]):.6g}") for i in range(0, len(values), width))


def started(task: Task, seed: int, device: str) -> nn.Module:
    """Return a new model of `task` with the weights of `seed`."""
    torch.manual_seed(seed)
    return task.model().to(device)


class Probe(NamedTuple):
    """What a step of a candidate takes."""

    state_bytes: int  # between steps
    saved_bytes: int  # kept by autograd between forward and backward
    seconds: float  # about, since bytes were counted meanwhile


def probed(
    task: Task, candidate: Candidate, device: str, clock: Callable[[], float] = time.perf_counter
) -> Probe:  # fmt: skip
    """Return what the second step of a candidate takes, on a run of its own."""
    saved = 0

    def loss_fn(model: nn.Module, *batch: Any) -> Any:
        nonlocal saved
        with SavedForBackward(model) as kept:
            loss = task.loss_fn(model, *batch)
        saved = kept.bytes
        return loss

    loop = make_loop(candidate, replace(task, loss_fn=loss_fn), started(task, 0, device), PROBE_STEPS)
    seconds = 0.0
    for step in range(PROBE_STEPS):
        batch = task.batch_on(device, 0, step)
        seconds = timed(partial(loop, batch), device, clock)
    return Probe(state_bytes(*loop.state()), saved, seconds)


class _Training(Training):
    """Tells a listener of each step."""

    on_step: Callable[[Moment], None]
    steps: int

    def step(self, label: str, number: int) -> float:
        """Make a step."""
        seconds, loop = super().step(label, number), self.loops[label]
        last, speed = all(len(losses) == self.steps for losses in self.losses.values()), _samples(self.batch) / seconds
        self.on_step(
            Moment(seed=self.seed, step=number + 1, label=label, loop=loop, samples_per_second=speed, last=last)
        )
        return seconds


def _samples(batch: tuple[Any, ...]) -> int:
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    return 1 if first is None else first.shape[0]


def evaluated(task: Task, loop: Loop, seed: int) -> float:
    """Return the task's metric of the model in training, which stays in training mode."""
    torch.manual_seed(seed)
    loop.model.eval()
    with torch.no_grad():
        value = float(loop.evaluate(task))
    loop.model.train()
    return value
