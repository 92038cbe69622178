"""A part of a training step: what keeps one thing consistent from the first micro-batch of a window to its update.

The loss scale is a part, and so are BatchNorm's statistics, low copies of weights, fp32 sums of gradients, averages
over ranks, retries, the black box and metrics. A step has a part only for what is switched on. `Moments` calls the
parts; users add their own with ``TrainStep.add_part``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from halfstep.events import StepResult

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a loss function."""

Run = Callable[[Tensor, Tensor], None]
"""Runs the backward pass of a loss from a seed, both 0-dim."""

RunMicro = Callable[[tuple[Any, ...], dict[str, Any]], StepResult]
"""Runs a micro-batch, given by the two parts of a `Batch`."""


class Part:
    """One part of a training step; every method does nothing, and a subclass overrides the moments that it needs.

    The moments of a call, in their order. Those of a window come once in `accumulate` calls, the others in each:

    1. `begin_call`
    2. `begin_window`: gradients are dropped, and no forward pass has run
    3. `begin_micro_batch`, `passes`, `after_forward`, `loss_scale`, `seed`, `around_backward`, `end_micro_batch`
    4. `before_update`, `repeats`, `after_update`; if the window runs again, `again`
    5. `end_call`

    `abort` is called in the place of the rest where an exception cuts a call off, and before a window runs again. Parts
    are called in their order, at `repeats`, `after_update` and `abort` in reverse. A method must not wait for the
    device unless its part says so.

    Examples:
        >>> class Largest(hs.step.Part):
        ...     value = 0.0
        ...     def end_call(self, result, batch):
        ...         self.value = max(self.value, float(result.loss))
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
        >>> largest = step.add_part(Largest())
        >>> result = step(x, y)
        >>> largest.value > 0.0
        True
    """

    def begin_call(self) -> None:
        """Begin a call of the step; an earlier one may have been cut off."""

    def begin_window(self) -> None:
        """Begin a window of micro-batches."""

    def begin_micro_batch(self, number: int, batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        """See micro-batch `number` of the run, from 1, before its forward pass: the arguments of the loss function."""

    def passes(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context for a forward and a backward pass; `last`: the update of the window comes next."""
        return nullcontext()

    def after_forward(self, loss: Tensor) -> None:
        """See the detached, unscaled loss: a 0-dim tensor on the device."""

    def loss_scale(self, device: torch.device) -> Tensor:
        """Return the loss scale of the window, 0-dim fp32 on `device`; the last part that defines this decides."""
        raise NotImplementedError

    def seed(self, seed: Tensor) -> Tensor:
        """Return what the backward pass begins with in the place of `seed`."""
        return seed

    def around_backward(self, loss: Tensor, seed: Tensor, run: Run) -> None:
        """Run the backward pass: ``run(loss, seed)``."""
        run(loss, seed)

    def end_micro_batch(self, seed: Tensor, *, last: bool) -> None:
        """See the gradients after a backward pass, which began with `seed`; `last`: the update comes next."""

    def before_update(self) -> None:
        """Complete the gradients: the backward passes are over, and nothing has been written."""

    def repeats(self, bad: Tensor) -> bool:
        """Return whether the window runs again, not its update; `bad`, 0-dim bool: a gradient is not finite."""
        return False

    def again(self, result: StepResult, run: RunMicro, finish: Callable[[], StepResult] | None) -> StepResult:
        """Run the window again if `repeats` has said so, and return the result of the call, so far `result`.

        `run` runs one micro-batch, and the update after the last one of a window; `finish` updates with an unfinished
        window, as `TrainStep.flush` does, and is None in other calls.
        """
        return result

    def after_update(self, bad: Tensor) -> Exception | None:
        """See what was updated: parameters and optimizer state are written, unless `bad`, a 0-dim bool on the device.

        Signals are deferred. An exception that this returns is raised once the update is complete; one that it raises
        cuts the update off.
        """
        return None

    def abort(self, *, written: bool) -> None:
        """Return to the state before `begin_window`; may be called twice.

        Where the update has `written`, it cannot be undone: leave its state as it is.
        """

    def end_call(self, result: StepResult, batch: Batch | None) -> None:
        """See the result of a call: ``result.due`` says whether its window was updated.

        `batch` has the positional and the named arguments; None after `TrainStep.flush`.
        """
