"""The moments of a training step (`Part` describes them): who is called at each, and what an exception leaves.

Note [cut off]: an exception can end a call at any bytecode: Ctrl-C, a lack of memory, a hook of the user's. Before the
update a call has changed gradients and BatchNorm's statistics, which are restored. In the critical part, from the first
write of the optimizer to the end of `after_update`, signals are deferred. An exception there leaves a mixture of two
states, unless the optimizer's own ``step()`` runs and has not written yet (`Marks`); then every later call is
refused until a checkpoint is loaded. The phase is one attribute, assigned before anything is changed and after
everything is, so it is right at any bytecode, also where an exception ends the handling of another one; the next call
continues from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from halfstep.errors import StepError
from halfstep.events import StepWatcher
from halfstep.snapshot import Snapshot
from halfstep.step.part import Part
from halfstep.torch_private.autograd import set_grad_enabled
from halfstep.update.updater import Deferral

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P")


class Phase(Enum):
    """Which part of a call is under way, or was cut off; the value says so in an error."""

    REST = "nothing"
    MICRO_BATCH = "a micro-batch"
    UPDATE = "the update"
    ADVANCE = "the scheduler's step"
    LOAD = "load_state_dict"
    UNDECIDED = "the choice of a policy"


MOMENTS = [name for name in vars(Part) if not name.startswith("_")]

REVERSE = ("repeats", "after_update", "abort")
"""Moments at which parts are called in reverse of their order."""


def one_thread(function: F) -> F:
    """Return `function`, whose first argument is a training step, so that it holds the step's lock."""

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
    """Calls the parts of one training step, and keeps how far its current call has come.

    For each moment it has a list of methods, under the name that `Part` gives it; `call` makes the lists.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> list[Callable[..., Any]]: ...

    def __init__(self, parts: Iterable[object], has_written: Callable[[], bool]) -> None:
        self.phase = Phase.REST  # how far a call has come, or where it was cut off
        self.grad = True  # whether gradients were recorded where the call came from
        self.has_written = has_written  # whether an update under way has changed anything, as far as is known
        self.scheduler: Snapshot | None = None  # the scheduler before the step it is making
        self.interrupted = Phase.REST  # the phase in which it makes that step
        self.critical = Deferral()
        self.cause = ""  # what ended a part that cannot be undone
        self._one: Tensor | None = None
        self.call(parts)

    def call(self, parts: Iterable[object]) -> None:
        """Call these parts from now on: find their methods."""
        self.parts: tuple[object, ...] = (*parts,)
        for name in MOMENTS:
            methods = []
            for part in self.parts:
                found = getattr(type(part), name, None)
                if callable(found) and found is not getattr(Part, name):  # those of `Part` do nothing
                    methods.append(getattr(part, name))
            setattr(self, name, methods[::-1] if name in REVERSE else methods)

    def scale_on(self, device: torch.device) -> Tensor:
        """Return the loss scale of the coming window, 0-dim fp32 on `device`; 1 where no part decides it."""
        if self.loss_scale:
            scale: Tensor = self.loss_scale[-1](device)  # the last part decides
            return scale
        if self._one is None or self._one.device != device:
            self._one = torch.ones((), dtype=torch.float32, device=device)
        return self._one

    def add(self, part: P) -> P:
        """Call `part` too: it is the last of all; return it."""
        self.call((*self.parts, part))
        return part

    def remove(self, part: object) -> None:
        """Call `part` no longer, if it is one of the parts."""
        self.call(other for other in self.parts if other is not part)

    def begin(self) -> None:
        """Begin a window of micro-batches."""
        for call in self.begin_window:
            call()

    def complete(self) -> None:
        """Complete the gradients of the window."""
        for call in self.before_update:
            call()

    def update(self, write: Callable[[], None], bad: Tensor) -> None:
        """Carry out `write`, which changes parameters unless `bad`, and call `after_update`: the critical part."""
        raised: Exception | None = None
        with self.critical:
            self.phase = Phase.UPDATE
            write()
            for call in self.after_update:
                raised = call(bad) or raised
            self.phase = Phase.REST
        if raised is not None:
            raise raised

    def cut_off(self, error: BaseException | None = None) -> None:
        """Undo what the phase under way has changed, if that can be done; may be called again."""
        if error is not None:
            set_grad_enabled(self.grad)  # also where the end of a torch.no_grad() was cut off
        if self.phase is Phase.ADVANCE and self.scheduler is not None:
            self.scheduler.restore()
            self.phase = self.interrupted
        if self.phase not in {Phase.UPDATE, Phase.MICRO_BATCH}:
            return
        written = self.phase is Phase.UPDATE and self.has_written()
        if written and error is not None and not self.cause:
            self.cause = f"{type(error).__name__}{f' ({error})' if str(error) else ''} "
        for call in self.abort:
            call(written=written)
        if not written:
            self.phase = Phase.REST

    def refuse(self, done: int) -> None:
        """Undo what an earlier call has left, and refuse to go on if that cannot be done."""
        self.cut_off()
        if self.phase is not Phase.REST:
            cause = self.cause or "an exception "
            raise StepError(
                f"{cause}cut off {self.phase.value} after {done} micro-batches, and weights, optimizer state, loss "
                "scale and counters are partly those before it and partly those after it; load a checkpoint with "
                "step.load_state_dict(...), or build the TrainStep anew to go on from what is there"
            )

    def forget(self) -> None:
        """Begin anew: a checkpoint has been loaded."""
        self.phase, self.scheduler, self.cause = Phase.REST, None, ""


class Watchers(list[StepWatcher]):
    """The watchers of a training step, as a part of it."""

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self.parameters = parameters  # returns the optimizer's parameters that have gradients
        self.paused = False  # whether they see nothing: a captured update is no update

    def repeats(self, bad: Tensor) -> bool:
        """Show the watchers what is about to be updated; `Retry`, which is asked before, does not run it again."""
        if self and not self.paused:
            parameters = self.parameters()
            for watcher in self:
                watcher.before_update(parameters)
        return False

    def after_update(self, bad: Tensor) -> Exception | None:
        """Show them what became of it; return what one of them raised."""
        raised: Exception | None = None
        for watcher in () if self.paused else self:
            try:
                watcher.after_update(bad)
            except Exception as error:
                raised = raised or error
        return raised
