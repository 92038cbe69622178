"""The verdict on the last update, and who is given it: the learning-rate scheduler and the black box.

The host learns it as late as it can (note [bad steps] in `train_step`): on a CPU at once, else when the next forward
and backward pass are queued, or when a method of the step needs it.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.cast.state import STATE
from halfstep.errors import StepError, lacks_memory
from halfstep.events import StepResult
from halfstep.snapshot import Snapshot, scheduler_state
from halfstep.step.moments import Moments, Phase
from halfstep.step.part import Part

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

NUMBERS = count(1)


class Verdicts(Part):
    """Gives the verdict on each update of one training step to its scheduler and its black box.

    Ranks that are not `alone` examine a bad one together: each rank reaches the same place of the same step.
    """

    def __init__(self, step: TrainStep, moments: Moments, *, alone: bool) -> None:
        self._step, self.moments, self.alone = weakref.ref(step), moments, alone
        self._record = step.record
        self.ordinal = 0 if alone else next(NUMBERS)
        self.box: Any = None  # the black box, from the first step on that is not finite

    def before_update(self) -> None:
        """Examine the last update with the other ranks, while the parameters are those that it left."""
        if not self.alone and self._record.judged:
            self._examine(wait=True, together=True)

    def examine_at_once(self, result: StepResult) -> None:
        """Examine an update on a CPU before weights or batch can be written to."""
        if result.skipped.device.type == "cpu" and self._record.judged:
            self._examine(wait=False, together=True)

    def settle(self, *, wait: bool) -> None:
        """Give the verdict to black box and scheduler, if it is known or `wait`."""
        step, record = self._step(), self._record
        assert step is not None
        if self._record.judged:
            self._examine(wait=wait, together=self.alone)
        if step.scheduler is None:
            record.bad = None
        elif record.bad is not None:
            self._advance(step.scheduler, step.optimizer, wait=wait)
        record.look()

    def _advance(self, scheduler: LRScheduler, optimizer: Optimizer, *, wait: bool) -> None:
        """Advance `scheduler` if the last update was applied; where it raises, it stays one update behind."""
        record, moments = self._record, self.moments
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
            if lacks_memory(error) or not isinstance(error, Exception):
                raise  # the next call tries again
            record.bad = None
            raise StepError(
                f"{type(scheduler).__name__}.step() raised {type(error).__name__}: {error}. It is where it was before, "
                "one update behind; leave it out: step.scheduler = None"
            ) from error

    def black_box(self) -> Any:
        """Return the black box, made at the first call."""
        if self.box is None:
            from halfstep.lens.box.stepbox import StepBox

            step = self._step()
            assert step is not None
            self.box = StepBox(step)
            if self._record.history is not None:
                self._record.history.watched = True
        return self.box

    def _examine(self, *, wait: bool, together: bool) -> None:
        """Give the last update to the black box once its verdict is known; a bad one only with `together`."""
        history = self._record.history
        assert history is not None
        if (window := history.arrived(wait=wait)) is None or (window.wrong and not together):
            return
        window.seen = True
        if window.wrong or self.box is not None:
            copies, STATE.copies = STATE.copies, None  # a replay has its own
            try:
                self.black_box().see(window)
            finally:
                STATE.copies = copies
        if self._record.micro_batches:
            history.judged = None
