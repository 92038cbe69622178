"""Pace: time and bytes of a step under each candidate, in turns beside fp32; no metric, and no long training."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfstep.tasks.candidates import AMP, FP32, Candidate
from halfstep.tasks.compare import probed, started
from halfstep.tasks.loops import Training, make_loop
from halfstep.tasks.task import Task
from halfstep.timing import WARM_UP, Ratio

__all__ = ["Pace", "PaceRow", "pace"]

LEAST, MOST = 5, 400  # rounds, whatever the time allows
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
    """Time steps of every candidate in turns; count bytes in a step before.

    fp32 runs twice: what the two differ by is what cannot be resolved.

    Args:
        task: what to train; it needs no metric.
        candidates: from `candidates()`: fp32 and torch.amp first.
        device: device type to train on.
        seconds: how long to time, at least for `LEAST` rounds.
        on_share: called with the share that is done, from 0 to 1.
        clock: seconds, from any start.
    """
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
    amp = next(c.label for c in candidates if c.label.startswith(AMP))
    rows = tuple(
        PaceRow(
            label=c.label,
            milliseconds=1e3 * race.typical(c.label),
            to_fp32=None if c.label == FP32 else race.ratio(c.label, FP32),
            to_amp=None if c.label == amp else race.ratio(c.label, amp),
            slow=slow.get(c.label, 0.0),
            state_bytes=probes[c.label].state_bytes,
            saved_bytes=probes[c.label].saved_bytes,
        )
        for c in candidates
    )
    return Pace(
        task=task.name, about=task.about, parameters=sum(p.numel() for p in model.parameters()), device=device,
        control=control, rows=rows,
    )  # fmt: skip
