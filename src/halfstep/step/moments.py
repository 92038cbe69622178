"""The moments of a training step: which parts take part in it, when each is called, and what an exception leaves.

A *participant* is an object that keeps something consistent from the first micro-batch of a window to its update:
BatchNorm's statistics, low copies of weights, fp32 sums of gradients, averages over ranks, the loss scale, watchers,
the record. It has any of four methods. `Moments` calls each at its moment, the first two in the order of the
participants, the last two in reverse:

    begin_window()          gradients are dropped, and no forward pass has run
    before_update()         the backward passes are over, and nothing has been written
    after_update(bad)       parameters and optimizer state are written, unless `bad`: a 0-dim bool on the device. An
                            exception that it returns is raised once the update is complete; one that it raises cuts
                            the update off
    abort(written=...)      the window was cut off. `written`: its update has begun to write and cannot be undone;
                            else return to the state before `begin_window`. May be called twice

Note [cut off]: an exception can end a call at any bytecode: Ctrl-C, a lack of memory, a hook of the user's. Before the
update a call has changed gradients and BatchNorm's statistics, which are restored. In the critical part, from the first
write of the optimizer to the end of `after_update`, signals are deferred. An exception there leaves a mixture of two
states, unless the optimizer's own ``step()`` runs and has not written yet (`undo.Marks`); then every later call is
refused until a checkpoint is loaded. The phase is one attribute, assigned before anything is changed and after
everything is, so it is right at any bytecode, also where an exception ends the handling of another one; the next call
continues from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from halfstep.errors import StepError
from halfstep.events import StepWatcher
from halfstep.update.deferral import Deferral
from halfstep.update.undo import SchedulerCopy

__all__ = ["ADVANCE", "LOAD", "REST", "UPDATE", "MICRO_BATCH", "Moments", "Watchers", "one_thread"]

REST = ""  # between calls
MICRO_BATCH = "a micro-batch"
UPDATE = "the update"
ADVANCE = "the scheduler's step"
LOAD = "load_state_dict"

F = TypeVar("F", bound=Callable[..., Any])


def one_thread(function: F) -> F:
    """Return `function`, whose first argument is a training step, for one thread at a time: it holds the step's lock.

    Raises:
        StepError: another thread is inside such a function of the same step; nothing was changed.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls = getattr(args[0] if args else kwargs.get("step"), "_calls", None)
        if calls is None:  # no step: the function says so itself
            return function(*args, **kwargs)
        if not calls.acquire(False):
            name = "step(...)" if function.__name__ == "__call__" else function.__name__
            raise StepError(
                f"{name}: another thread is inside this "
                "TrainStep, whose weights, optimizer state and checkpoints are those of one moment; call it from one "
                "thread, or hold a lock of your own around the calls; hs.save(step, path, wait=False) in the training "
                "thread writes in another one"
            )
        try:
            return function(*args, **kwargs)
        finally:
            calls.release()

    return cast(F, call)


class Moments:
    """Calls the participants of one training step, and keeps how far its current call has come.

    Args:
        participants: in their order.
        has_written: returns whether an update under way has changed anything, as far as is known.

    Attributes:
        phase: which part of a call is under way, or was cut off; `REST` between calls.
        grad: whether gradients were recorded where the call came from.
        scheduler: the scheduler before the step it is making.
        interrupted: the phase in which it makes that step.
        critical: the context manager of the critical part.
        cause: what ended a part that cannot be undone.
    """

    __slots__ = (
        "_abort",
        "_after",
        "_before",
        "_begin",
        "cause",
        "critical",
        "grad",
        "has_written",
        "interrupted",
        "phase",
        "scheduler",
    )

    def __init__(self, participants: Iterable[object], has_written: Callable[[], bool]) -> None:
        self.phase = self.interrupted = REST
        self.grad = True
        self.has_written = has_written
        self.scheduler: SchedulerCopy | None = None
        self.critical = Deferral()
        self.cause = ""
        self._begin: list[Callable[[], None]] = []
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[Tensor], Exception | None]] = []
        self._abort: list[Callable[..., None]] = []
        for participant in participants:
            self.add(participant)

    def add(self, participant: object) -> None:
        """Call `participant` too: it is the last of all."""
        for name, calls in (("begin_window", self._begin), ("before_update", self._before)):
            if hasattr(participant, name):
                calls.append(getattr(participant, name))
        for name, reverse in (("after_update", self._after), ("abort", self._abort)):
            if hasattr(participant, name):
                reverse.insert(0, getattr(participant, name))

    def begin_window(self) -> None:
        """Begin a window of micro-batches."""
        for call in self._begin:
            call()

    def before_update(self) -> None:
        """Complete the gradients of the window."""
        for call in self._before:
            call()

    def update(self, write: Callable[[], None], bad: Tensor) -> None:
        """Carry out `write`, which changes parameters unless `bad`, and call `after_update`: the critical part.

        Raises:
            Exception: what a participant returned.
        """
        raised: Exception | None = None
        with self.critical:
            self.phase = UPDATE
            write()
            for call in self._after:
                raised = call(bad) or raised
            self.phase = REST
        if raised is not None:
            raise raised

    def restart(self) -> None:
        """Return to the state before the window, whose update has not begun: it runs again."""
        for call in self._abort:
            call(written=False)

    def abort(self, error: BaseException | None = None) -> None:
        """Undo what the phase under way has changed, if that can be done; may be called again.

        Args:
            error: what cut it off; None: not known.
        """
        if error is not None:
            torch._C._set_grad_enabled(self.grad)  # also where the end of a torch.no_grad() was cut off
        if self.phase == ADVANCE and self.scheduler is not None:
            self.scheduler.restore()
            self.phase = self.interrupted
        if self.phase not in {UPDATE, MICRO_BATCH}:
            return
        written = self.phase == UPDATE and self.has_written()
        if written and error is not None and not self.cause:
            self.cause = f"{type(error).__name__}{f' ({error})' if str(error) else ''} "
        for call in self._abort:
            call(written=written)
        if not written:
            self.phase = REST

    def refuse(self, done: int) -> None:
        """Undo what an earlier call has left, and refuse to go on if that cannot be done.

        Args:
            done: micro-batches of the updates made so far.

        Raises:
            StepError: it was cut off where it cannot be undone.
        """
        self.abort()
        if self.phase:
            cause = self.cause or "an exception "
            raise StepError(
                f"{cause}cut off {self.phase} after {done} micro-batches, and weights, optimizer state, loss "
                "scale and counters are partly those before it and partly those after it; load a checkpoint with "
                "step.load_state_dict(...), or build the TrainStep anew to go on from what is there"
            )

    def forget(self) -> None:
        """Begin anew: a checkpoint has been loaded."""
        self.phase, self.scheduler, self.cause = REST, None, ""


class Watchers(list[StepWatcher]):
    """The watchers of a training step, as a participant of it.

    Attributes:
        parameters: returns the optimizer's parameters that have gradients.
        paused: whether they see nothing: a captured update is no update.
        discards: returns whether these parameters' window runs again instead, which is no update either.
    """

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self.parameters, self.paused = parameters, False
        self.discards: Callable[[Sequence[nn.Parameter]], bool] | None = None

    def before_update(self) -> None:
        """Show the watchers what is about to be updated."""
        if self and not self.paused:
            parameters = self.parameters()
            if self.discards is not None and any(w.wants_update() for w in self) and self.discards(parameters):
                return
            for watcher in self:
                watcher.before_update(parameters)

    def after_update(self, bad: Tensor) -> Exception | None:
        """Show them what became of it; return what one of them raised."""
        raised: Exception | None = None
        for watcher in () if self.paused else self:
            try:
                watcher.after_update(bad)
            except Exception as error:
                raised = raised or error
        return raised
