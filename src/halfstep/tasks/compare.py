"""Compare: train every candidate from the same weights on the same batches, in turns; measure result and cost.

`compare` trains to the end, with every seed; `pace` measures time and bytes of a step alone, of tasks without a metric.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import halfstep as hs
from halfstep.tasks.candidates import FP32, Candidate, amp_of
from halfstep.tasks.loops import Loop, OnStep, Training, make_loop
from halfstep.tasks.measure import Difference, SavedForBackward, difference, finite_mean, state_bytes
from halfstep.tasks.task import Task
from halfstep.timing import WARM_UP, Ratio, ratio_of, timed

CURVE_POINTS = 200  # of a loss curve, at most: more than a picture shows
PROBE_STEPS = 2  # the first makes optimizer state and buffers, the second is counted and timed
LEAST, MOST = 5, 400  # rounds of a pace, whatever the time allows
SLOW, SLOW_SECONDS = 6.0, 0.5  # a candidate whose step takes this many times fp32's, and this long, has no turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of a step of one candidate."""

    label: str  # the candidate
    milliseconds: float  # median time of a step
    to_fp32: Ratio | None  # paired ratio of step time to fp32's; None for fp32 itself, or if no step was timed
    to_amp: Ratio | None  # paired ratio of step time to torch.amp's; None for torch.amp itself
    state_bytes: int  # of parameters, buffers, optimizer state, precise weights and lasting gradient buffers
    saved_bytes: int  # kept by autograd between forward and backward of one step, parameters excepted
    slow: float = 0.0  # times fp32's step that its step took, if it was left out of turns for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Steps of one task under every candidate."""

    task: str  # its name
    about: str  # model and data in one line
    parameters: int
    device: str  # the device type everything ran on
    control: Ratio  # fp32 over fp32: the ratio of identical programs on this machine
    rows: tuple[Cost, ...]  # one a candidate, fp32 and torch.amp first


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateRow(Cost):
    """Result and cost of one candidate."""

    policy: str  # its policy as TOML, "" for loops of torch alone
    notes: tuple[str, ...]  # those of its plan, such as how fp16 runs on a device without fp16 units
    metrics: tuple[float, ...]  # final metric, one a seed
    difference: Difference  # of the metric from fp32's, paired by seed
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
    """Bind every candidate to the model once, so that errors are raised before anything is trained."""
    task.margin_around(0.0)
    model = started(task, 0, device)
    for candidate in candidates:
        make_loop(candidate, task, copy.deepcopy(model), 1)


def compare(
    task: Task, candidates: Sequence[Candidate], *, steps: int, seeds: int, device: str = "cpu",
    on_step: OnStep = lambda training, label, number, seconds: None,
) -> Comparison:  # fmt: skip
    """Train and measure every candidate (fp32 and torch.amp first) in turns; torch.amp twice, as a control."""
    amp = amp_of(candidates)
    twin = Candidate(label=f"{amp.label} again", dtype=amp.dtype)
    runners = [*candidates, twin]
    probes = {c.label: probed(task, c, device) for c in candidates}
    times: dict[str, dict[int, float]] = {c.label: {} for c in runners}
    ends: dict[str, list[tuple[float, tuple[int, ...], float]]] = {c.label: [] for c in runners}
    curves: dict[str, list[list[float]]] = {c.label: [] for c in runners}
    for seed in range(seeds):
        model = started(task, seed, device)
        loops = {c.label: make_loop(c, task, copy.deepcopy(model), steps) for c in runners}
        training = Training(task, loops, device=device, seed=seed, on_step=on_step)
        for step in range(steps):
            training.round(loops, step, timed=step >= WARM_UP)
        for label, loop in loops.items():
            found = training.times.get(label, {})
            times[label] |= {seed * steps + step: seconds for step, seconds in found.items()}
            curves[label].append(training.floats(label))
            ends[label].append((evaluated(task, loop, seed), loop.skipped(), loop.scale()))
    reference = [metric for metric, _, _ in ends[FP32]]
    margin = task.margin_around(statistics.fmean(reference))
    rows = []
    for candidate, cost in zip(candidates, _costs(candidates, times, probes), strict=True):
        label = candidate.label
        metrics, skipped_steps, scales = (tuple(column) for column in zip(*ends[label], strict=True))
        rows.append(
            CandidateRow(
                **cost,
                policy="" if candidate.policy is None else candidate.policy.to_toml(),
                notes=() if candidate.policy is None else hs.resolve(candidate.policy, started(task, 0, device)).notes,
                metrics=metrics,
                difference=difference(metrics, reference, margin, higher=task.higher_is_better),
                skipped=tuple(map(len, skipped_steps)),
                skipped_steps=skipped_steps,
                scale=scales,
                losses=thinned([finite_mean(values) for values in zip(*curves[label], strict=True)]),
            )
        )
    return Comparison(
        task=task.name, about=task.about, metric=task.metric_name, higher_is_better=task.higher_is_better,
        margin=margin, device=device, steps=steps, seeds=tuple(range(seeds)),
        loss_steps=thinned(range(1, steps + 1)), control=ratio_of(times[twin.label], times[amp.label]),
        repeatable=[repr(e) for e in ends[twin.label]] == [repr(e) for e in ends[amp.label]], rows=tuple(rows),
    )  # fmt: skip


def _costs(
    candidates: Sequence[Candidate], times: Mapping[str, Mapping[int, float]], probes: Mapping[str, "Probe"]
) -> list[dict[str, Any]]:
    """Return the fields of a `Cost` for each candidate, by its seconds in each round."""

    def ratio(label: str, baseline: str) -> Ratio | None:
        return None if label == baseline else ratio_of(times.get(label, {}), times.get(baseline, {}))

    return [
        {
            "label": label,
            "milliseconds": 1e3 * (statistics.median(times[label].values()) if times.get(label) else math.nan),
            "to_fp32": ratio(label, FP32),
            "to_amp": ratio(label, amp_of(candidates).label),
            "state_bytes": probes[label].state_bytes,
            "saved_bytes": probes[label].saved_bytes,
        }
        for label in (candidate.label for candidate in candidates)
    ]


def thinned(values: Sequence[float]) -> tuple[float, ...]:
    """Return means of consecutive values to six digits, at most `CURVE_POINTS`; nan where a value is not finite."""
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


def probed(task: Task, candidate: Candidate, device: str, clock: Callable[[], float] = time.perf_counter) -> Probe:
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
    return Probe(state_bytes(*loop.state), saved, seconds)


def evaluated(task: Task, loop: Loop, seed: int) -> float:
    """Return the task's metric of the model in training, which stays in training mode."""
    torch.manual_seed(seed)
    loop.model.eval()
    with torch.no_grad():
        value = float(loop.evaluate(task))
    loop.model.train()
    return value


def pace(
    task: Task, candidates: Sequence[Candidate], *, device: str, seconds: float,
    on_share: Callable[[float], None] = lambda share: None, clock: Callable[[], float] = time.perf_counter,
) -> Pace:  # fmt: skip
    """Time steps of every candidate in turns, fp32 twice as a control; count bytes before."""
    probes = {c.label: probed(task, c, device, clock) for c in candidates}
    reference = probes[FP32].seconds
    slow = {
        label: probe.seconds / reference
        for label, probe in probes.items()
        if probe.seconds > max(SLOW * reference, SLOW_SECONDS)
    }
    model = started(task, 0, device)
    twin = Candidate(label=f"{FP32} again", dtype=FP32)
    timed = [c for c in (*candidates, twin) if c.label not in slow]
    loops = {c.label: make_loop(c, task, copy.deepcopy(model), WARM_UP + MOST) for c in timed}
    race = Training(task, loops, device=device, seed=0, clock=clock)
    race.run(list(loops), seconds=seconds, least=LEAST, most=MOST, clock=clock, on_share=on_share)
    control = race.ratio(twin.label, FP32)
    assert control is not None
    costs = _costs(candidates, race.times, probes)
    rows = tuple(Cost(**cost, slow=slow.get(cost["label"], 0.0)) for cost in costs)
    return Pace(
        task=task.name, about=task.about, parameters=sum(p.numel() for p in model.parameters()), device=device,
        control=control, rows=rows,
    )  # fmt: skip
