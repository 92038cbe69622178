"""The learning-rate scheduler of a training step: it advances after an update that was applied, or stays where it is.

In: a scheduler of torch, or any object with its methods. If its `step` raises, scheduler and groups stay unchanged.
"""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.errors import StepError
from halfstep.step.moments import ADVANCE, REST, Moments
from halfstep.step.record import Record
from halfstep.step.undo import SchedulerCopy

__all__ = ["advance"]


def advance(scheduler: LRScheduler, optimizer: Optimizer, moments: Moments, record: Record) -> None:
    """Advance `scheduler`, of `optimizer`, by one update, and note in `record` that the verdict is used up.

    Raises:
        StepError: ``scheduler.step()`` raised; it stays one update behind.
    """
    try:
        moments.scheduler = SchedulerCopy(scheduler, optimizer)
        moments.phase = ADVANCE
        scheduler.step()
        record.bad = None
        moments.phase = REST
    except BaseException as error:
        moments.abort()
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            raise  # the next call tries again
        record.bad = None
        raise StepError(
            f"{type(scheduler).__name__}.step() raised {type(error).__name__}: {error}. It is where it was before, "
            "one update behind; leave it out: step.scheduler = None"
        ) from error
