"""Events: what a training step returns, and what the black box finds.

`StepResult` is a handle on device tensors, `StepResult.host` its frozen copy in Python numbers. A `Verdict` explains a
step that is not finite, by its cause and its `Cure` list. `StepWatcher` is the protocol of what observes updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["WEIGHTS_ATTRIBUTE", "Cure", "HostStepResult", "StepResult", "StepWatcher", "Verdict"]

WEIGHTS_ATTRIBUTE = "_halfstep_weights"
"""An optimizer with this attribute steps precise weights behind low parameters, which may have fp32 gradients."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cure:
    """A change of policy for a step that went wrong.

    Attributes:
        policy: the whole policy with the change made, an `hs.Policy`; None where the change is none of a policy.
        text: the change in words and as a line of code.
        verified: whether the step was replayed with it and was finite.
    """

    policy: Any
    text: str
    verified: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a step was not finite; printing it is a report. What is absent is "" or ().

    Attributes:
        kind: "overflow", "invalid", "bad_batch", "bad_state", "scale_too_high" or "not_reproducible".
        op: public short name of the operator that made the first non-finite value, such as "linear".
        module: dotted name of the module it was called in; "" for the root and for what no module calls.
        phase: "forward", "backward" or "update".
        line: the user's line that called it: "file.py:12 text".
        parameter: name of the parameter, buffer, optimizer state or input that was not finite, or that the format of
            the result cannot hold.
        dtypes: formats of the tensors it was given.
        shapes: their shapes.
        value: largest magnitude among them.
        limit: largest number of the format its result has; 0.0 if that does not matter.
        rank: rank of the process it happened on.
        ranks: all ranks on which the step was not finite, of those that make each step together; () if there are no
            others, or if the step was finite on each.
        step: the step of the TrainStep or BlackBox, from 1.
        cures: changes under which the step is finite, smallest first; then unverified advice.
        detail: the part of the headline that follows the place.
        notes: other observations.
    """

    kind: str
    op: str = ""
    module: str = ""
    phase: str = ""
    line: str = ""
    parameter: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    value: float = 0.0
    limit: float = 0.0
    rank: int = 0
    ranks: tuple[int, ...] = ()
    step: int = 0
    cures: tuple[Cure, ...] = ()
    detail: str = ""
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Operator, module and line in one phrase."""
        parts = [self.op, f"in {self.module}" if self.module else "", f"at {self.line}" if self.line else ""]
        return " ".join(part for part in parts if part)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        rank = f" on rank {self.rank}" if self.rank or self.ranks else ""
        return f"step {self.step}{rank}: {self._sentence()}"

    def _sentence(self) -> str:
        what = f"{self.phase} of {self.where}" if self.where else self.phase
        if self.kind == "overflow":
            limit = (
                f"; the largest input is {self.value:.6g}, the format ends at {self.limit:.6g}" if self.limit else ""
            )
            return f"overflow in {what}; {self.detail}" if self.detail else f"overflow in {what}{limit}"
        if self.kind == "invalid":
            return f"invalid operation in {what}: {self.detail or 'there is no finite result for these finite inputs'}"
        if self.kind == "bad_batch":
            return f"the batch is not finite: {self.parameter}" + (f": {self.detail}" if self.detail else "")
        if self.kind == "bad_state":
            return f"{self.parameter or 'the state'} is not finite before the step" + (f"; {what}" if self.op else "")
        if self.kind == "scale_too_high":
            return f"the loss scale is too high for {what}" + (f"; {self.detail}" if self.detail else "")
        return f"not reproducible: {self.detail or 'the replay of this step is finite'}"

    def __str__(self) -> str:
        """Return the report: one fact a line, then what to change."""
        lines = [f"halfstep black box, {self.headline}"]
        facts = [("operator", self.op), ("module", self.module), ("line", self.line), ("phase", self.phase)]
        facts.append(("value of", self.parameter))
        facts.append(("ranks", ", ".join(map(str, self.ranks)) if len(self.ranks) > 1 else ""))
        if self.shapes:
            inputs = zip(self.dtypes, self.shapes, strict=True)
            facts.append(("inputs", ", ".join(f"{d} {list(s)}" for d, s in inputs)))
            facts.append(("largest", f"{self.value:.6g}" + (f", limit {self.limit:.6g}" if self.limit else "")))
        lines += [f"  {name:<9} {text}" for name, text in facts if text]
        lines += [f"  note      {note}" for note in self.notes]
        for cure in self.cures:
            mark = "cure, verified by replay" if cure.verified else "advice, not verified"
            lines.append(f"  {mark}: " + cure.text.replace("\n", "\n      "))
        return "\n".join(lines)
