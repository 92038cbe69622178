"""Events: what a training step returns, and who observes its updates.

`StepResult` is a handle on device tensors, `StepResult.host` its frozen copy in Python numbers. `StepWatcher` is the
protocol of what observes updates. `hook_weakly` registers a hook that ends with its object.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

WEIGHTS_ATTRIBUTE = "_halfstep_weights"
"""An optimizer with this attribute steps precise weights behind low parameters, which may have fp32 gradients."""


def hook_weakly(register: Callable[[Callable[..., Any]], Any], method: Callable[..., Any]) -> Any:
    """Register a bound method as a hook; return torch's handle. The hook does not keep its object and ends with it."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        run = found()
        return None if run is None else run(*args)

    call.__module__ = method.__module__  # `step.update` knows halfstep's own hooks by it
    handle = register(call)
    weakref.finalize(method.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]
    return handle


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStepResult:
    """One training step as plain Python values.

    Attributes:
        step: number of micro-batches seen by this TrainStep, from 1.
        loss: the detached, unscaled, undivided loss.
        scale: the loss scale the backward pass used (1.0 without scaling).
        updated: whether the optimizer changed the parameters.
        skipped: whether an update was due and was not applied because the gradient norm was not finite.
        grad_norm: 2-norm over all gradients, unscaled, before clipping; nan while accumulating.
        culprits: names of the parameters whose gradient was not finite.
        retries: how often the window has run again at a lower scale before this.

    Examples:
        >>> host = hs.TrainStep(model, optimizer, loss_fn)(x, y).host()
        >>> host.step, host.updated, host.skipped, host.culprits
        (1, True, False, ())
    """

    step: int
    loss: float
    scale: float
    updated: bool
    skipped: bool
    grad_norm: float
    culprits: tuple[str, ...] = ()
    retries: int = 0


@dataclass(slots=True)
class StepResult:
    """One training step as a handle on device tensors; nothing here waits for the device.

    Attributes:
        step: number of micro-batches seen by this TrainStep, from 1.
        loss: 0-dim tensor, detached, unscaled, undivided.
        aux: what loss_fn returned beside the loss, a tree in its type with its tensors detached, or None.
        scale: 0-dim fp32 tensor, the loss scale of this backward pass.
        grad_norm: 0-dim fp32 tensor, unscaled, before clipping; nan while accumulating.
        skipped: 0-dim bool tensor: an update was due and was not applied.
        due: whether an update was due, which is after the last micro-batch of a window.
        retries: how often the window has run again at a lower scale before this: ``TrainStep(retry=...)``.

    Examples:
        >>> result = hs.TrainStep(model, optimizer, loss_fn)(x, y)
        >>> result.loss.shape, result.due  # of the device, without waiting
        (torch.Size([]), True)
        >>> result.host().loss == result.loss.item()
        True
    """

    step: int
    loss: torch.Tensor
    aux: Any
    scale: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    due: bool
    find_culprits: Callable[[], tuple[str, ...]] = tuple
    retries: int = 0

    @property
    def updated(self) -> torch.Tensor:
        """Whether the optimizer changed the parameters, 0-dim bool tensor."""
        return ~self.skipped if self.due else self.skipped

    @property
    def culprits(self) -> tuple[str, ...]:
        """Names of the parameters whose gradient was not finite; reads the device if the step was skipped."""
        return self.find_culprits() if bool(self.skipped) else ()

    def host(self) -> HostStepResult:
        """Copy the result to the host (waits for the device) and return it frozen."""
        return HostStepResult(
            step=self.step,
            loss=float(self.loss),
            scale=float(self.scale),
            updated=bool(self.updated),
            skipped=bool(self.skipped),
            grad_norm=float(self.grad_norm),
            culprits=self.culprits,
            retries=self.retries,
        )


class StepWatcher(Protocol):
    """Observer of a training step's updates; it changes nothing and waits for nothing.

    A captured step (``cuda_graph=True``) runs eagerly if a watcher wants to see the update, and else is replayed.
    """

    def wants_update(self) -> bool:
        """Return whether to call `before_update` and `after_update` at the next update; constant until then."""

    def pass_update(self) -> None:
        """Count an update that was not to be seen."""

    def before_update(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Read the parameters about to be updated, with their scaled gradients."""

    def after_update(self, bad: torch.Tensor) -> None:
        """Read them after the update, gradients included; `bad`, a 0-dim bool: it was not applied."""
