"""The learning-rate scheduler of a training step: it advances after an update that was applied, or stays where it is.

In: a scheduler of torch, or any object with its methods. If its `step` raises, scheduler and groups stay unchanged.
"""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.errors import StepError
from halfstep.snapshot import Snapshot, scheduler_state
from halfstep.step.moments import Moments, Phase
from halfstep.step.parts.record import Record

__all__ = ["advance"]


def advance(scheduler: LRScheduler, optimizer: Optimizer, moments: Moments, record: Record, *, wait: bool) -> None:
    """Advance `scheduler`, of `optimizer`, if the last update was applied, and note that its verdict is used up."""
    flag, bad = record.bad, record.verdict(wait=wait)
    if bad is None:
        return
    try:
        if not bad:
            moments.scheduler = Snapshot(scheduler_state(scheduler, optimizer))
            moments.interrupted = moments.phase
            moments.phase = Phase.ADVANCE
            scheduler.step()
        record.bad = None
        if not bad:
            moments.phase = moments.interrupted
    except BaseException as error:
        if moments.phase is Phase.ADVANCE:
            record.bad = flag
        moments.cut_off()
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            raise  # the next call tries again
        record.bad = None
        raise StepError(
            f"{type(scheduler).__name__}.step() raised {type(error).__name__}: {error}. It is where it was before, "
            "one update behind; leave it out: step.scheduler = None"
        ) from error
