"""How far a call of a training step has come, so that one that is cut off is undone, or named and refused.

Note [cut off]: an exception can end a call at any bytecode: Ctrl-C, a lack of memory, a hook of the user's. Up to the
update a call has changed gradients and BatchNorm's statistics, which are put back: the state is that before the
window. In the critical part, from the first write of the optimizer to the end of the book-keeping (statistics, scale,
counters, the verdict that the scheduler waits for), signals wait (`signals`). What else ends it leaves a mixture of
two states, unless the optimizer has not written anything yet (`undo.Marks`); then every later call is refused, until a
checkpoint is loaded. A phase is one attribute, written before anything is changed and after everything is, so that it
is right at any bytecode, also where an exception ends the handling of another one: the next call goes on with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.cast.state import STATE
from halfstep.errors import StepError
from halfstep.step.signals import Deferral
from halfstep.step.undo import Marks, SchedulerCopy

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

__all__ = ["ADVANCE", "LOAD", "REST", "UPDATE", "WINDOW", "Progress"]

REST = ""  # between calls
WINDOW = "a micro-batch"
UPDATE = "the update"
ADVANCE = "the scheduler's step"
LOAD = "load_state_dict"


class Progress:
    """The phase of one training step.

    Attributes:
        grad: whether gradients were recorded where the call came from.
        phase: which part of a call is under way, or was cut off; `REST` between calls.
        marks: what the optimizer had written before this update; None: not known.
        scheduler: the scheduler before the step it is making.
        critical: the context manager of the critical part.
        cause: what ended a part that cannot be undone.
    """

    __slots__ = ("cause", "critical", "grad", "marks", "phase", "scheduler")

    def __init__(self) -> None:
        self.phase = REST
        self.grad = True
        self.marks: Marks | None = None
        self.scheduler: SchedulerCopy | None = None
        self.critical = Deferral()
        self.cause = ""

    def undo(self, step: TrainStep, error: BaseException | None = None) -> None:
        """Put back what the phase under way has changed, if that can be done; may be called again.

        Args:
            step: whose phase it is.
            error: what cut it off; None: not known.
        """
        if error is not None:
            torch._C._set_grad_enabled(self.grad)  # also where the end of a torch.no_grad() was cut off
        if STATE.visit is step._visit:
            STATE.visit = None
        if self.phase == ADVANCE and self.scheduler is not None:
            self.scheduler.put_back()
            self.phase = REST
        if self.phase not in {UPDATE, WINDOW}:
            return
        store = step._store
        whole = self.phase == WINDOW or (self.marks is not None and not self.marks.moved())
        if not whole and error is not None and not self.cause:
            self.cause = f"{type(error).__name__}{f' ({error})' if str(error) else ''} "
        if store is not None:
            store.restore(write_back=not whole)
            store.drop_gradients(step.optimizer)
        if self.marks is not None:
            self.marks.put_back() if whole else self.marks.end()
        if not whole:
            return
        step._statistics.restore()
        step._sums.begin()
        step._window = 0  # its gradients are partial, and dropped by the next call
        self.phase, self.marks = REST, None

    def forget(self) -> None:
        """Begin anew: a checkpoint has been loaded."""
        self.phase, self.marks, self.scheduler, self.cause = REST, None, None, ""

    def refuse(self, step: TrainStep) -> None:
        """Undo what an earlier call has left, or refuse to go on.

        Raises:
            StepError: it was cut off where it cannot be undone.
        """
        self.undo(step)
        if self.phase:
            cause = self.cause or "an exception "
            raise StepError(
                f"{cause}cut off {self.phase} after {step._step} micro-batches, and weights, optimizer state, loss "
                "scale and counters are partly those before it and partly those after it; load a checkpoint with "
                "step.load_state_dict(...), or build the TrainStep anew to go on from what is there"
            )
