"""What has happened since the last `update`: per optimizer, and flags from elsewhere; which gradients are scaled.

A gradient that appears or changes between `unscale_` and `step` may come from the user (clipping, a replacement) or
from a backward pass, and versions and addresses do not tell which. So a scaled loss that is still to be differentiated
while an optimizer is unscaled gets a hook: gradients are compared when its backward pass begins and when it has ended.
Loops that call `update` after every step have no such loss and pay for a weak reference.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from halfstep.errors import ScaleError
from halfstep.mistakes import MISTAKES
from halfstep.scale.finite import gradients, names_of

Gradients = list[tuple[Tensor, Tensor | None, int]]
"""Parameters, and their gradients with their versions, as they were when a backward pass began."""


class Stage(enum.Enum):
    """How far an optimizer has come since the last update."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass(slots=True)
class OptimizerWork:
    """What one optimizer has done since the last update.

    A parameter's gradient is *late* if all of it came from scaled losses after `unscale_`, and *mixed* if such a loss
    was added to a gradient that had been unscaled. Both are kept by ``id(parameter)``, so that they stay true when
    ``p.grad`` is replaced by a function of itself.
    """

    optimizer: torch.optim.Optimizer
    stage: Stage = Stage.READY
    found: Tensor | None = None  # 0-dim fp32 on the scale's device, not zero = bad; None = it had no gradients
    bad: bool | None = None  # what the host read of `found`; None = it has not been read
    late: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    running: list[Gradients] = field(default_factory=list)  # backward passes begun since `unscale_` and not ended
    first: TensorWeakRef | None = None  # the first gradient that was unscaled
    unfollowed: int = 0  # losses that had been scaled in compiled code by then

    def mark_unscaled(self, unfollowed: int) -> None:
        """Note that the gradients there are now have been unscaled."""
        self.stage, self.unfollowed = Stage.UNSCALED, unfollowed
        first = self._first_gradient()
        self.first = None if first is None else TensorWeakRef(first)

    def is_as_unscaled(self, unfollowed: int) -> bool:
        """Return whether gradients were unscaled and no scaled loss has been differentiated since."""
        since = self.late or self.mixed or self.running
        return self.found is not None and unfollowed == self.unfollowed and not since

    def is_unclear(self, unfollowed: int) -> bool:
        """Return whether gradients that no known loss made may be scaled ones."""
        if self.first is None:
            return True
        return unfollowed != self.unfollowed and self.first() is not self._first_gradient()

    def _first_gradient(self) -> Tensor | None:
        return next((gradient for _, gradient in gradients(self.optimizer)), None)

    def begin_pass(self) -> Gradients:
        """Note the gradients there are when a backward pass begins."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        begun = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in parameters]
        if self.late or self.mixed:  # gradients that are gone
            empty = {id(parameter) for parameter, gradient, _ in begun if gradient is None}
            self.late -= empty
            self.mixed -= empty
        self.running.append(begun)
        return begun

    def end_pass(self, ended: Gradients) -> None:
        """Note which gradients a backward pass has made, and to which it has added."""
        running = [begun for begun in self.running if begun is not ended]
        if len(running) == len(self.running):
            return
        self.running = running
        for parameter, before, version in ended:
            now = parameter.grad
            if now is None or (now is before and now._version == version):
                continue
            if before is None:
                self.late.add(id(parameter))
                self.mixed.discard(id(parameter))
            elif id(parameter) not in self.late:
                self.mixed.add(id(parameter))

    def classify(self) -> tuple[list[Tensor], bool, bool]:
        """Return the parameters with a mixed gradient, and whether there are late ones, and others."""
        for unfinished in list(self.running):  # an exception ended the pass
            self.end_pass(unfinished)
        present = [parameter for parameter, _ in gradients(self.optimizer)]
        ids = {id(parameter) for parameter in present}
        self.mixed &= ids
        self.late &= ids
        mixed = [parameter for parameter in present if id(parameter) in self.mixed]
        return mixed, bool(self.late), bool(ids - self.mixed - self.late)


@dataclass(slots=True)
class Iteration:
    """Everything done since the last update: by each optimizer (its id), and flags that belong to none."""

    work: dict[int, OptimizerWork] = field(default_factory=dict)
    recorded: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self.work) or self.recorded is not None

    def of(self, optimizer: torch.optim.Optimizer, method: str) -> OptimizerWork:
        """Return what `optimizer` has done, a new entry if there is none; `method` is for the message."""
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            kind = type(optimizer).__name__
            raise ScaleError(
                f"{method}(optimizer): got {kind}, which has no param_groups; pass a torch.optim.Optimizer"
            )
        return self.work.setdefault(id(optimizer), OptimizerWork(optimizer))

    def current(
        self, optimizer: torch.optim.Optimizer, method: str, *, unfollowed: int, names: Mapping[Tensor, str] | None
    ) -> OptimizerWork:
        """Return what `optimizer` has done, after a check of what became of its gradients since it was unscaled.

        A new entry if its step was skipped by hand, so that all gradients are late. The old one's flag still counts.
        `unfollowed` losses have been scaled in compiled code so far; `method` and `names` are for messages.
        """
        work = self.of(optimizer, method)
        if work.stage is not Stage.UNSCALED or work.is_as_unscaled(unfollowed):
            return work
        mixed, late, others = work.classify()
        kind = type(optimizer).__name__
        remedy = MISTAKES["HS203"].remedy
        if mixed:
            raise ScaleError(
                f"{method}(): unscale_() has been called on this {kind}, and a scaled loss was then added to unscaled "
                f"gradients: {', '.join(names_of(optimizer, mixed, names))}; {remedy}"
            )
        if others and method == "step" and work.is_unclear(unfollowed):
            raise ScaleError(
                f"{method}(): this {kind} has gradients that came after unscale_(), and it is not known whether they "
                f"are scaled; {remedy}"
            )
        if late and not others:
            if work.found is not None:
                self.record(work.found)
            work = self.work[id(optimizer)] = OptimizerWork(optimizer)
        return work

    def unscaled(self) -> list[OptimizerWork]:
        """Return the entries of optimizers that were unscaled and not stepped."""
        return [work for work in self.work.values() if work.stage is Stage.UNSCALED]

    def record(self, found: Tensor) -> None:
        """Add a flag that belongs to no optimizer: 0-dim, fp32 or bool, on the scale's device, not zero = bad."""
        self.recorded = found if self.recorded is None else torch.maximum(self.recorded, found)

    def found(self) -> Tensor | None:
        """Return the maximum of all flags, 0-dim, fp32 or bool, without reading it; None without any gradient."""
        found = self.recorded
        for work in self.work.values():
            if work.found is not None:
                found = work.found if found is None else torch.maximum(found, work.found)
        return found

    def known_bad(self) -> bool | None:
        """Return whether the host has read a bad flag, or None if it has not read enough to know."""
        read = [work.bad for work in self.work.values() if work.found is not None]
        if any(read):
            return True
        return None if self.recorded is not None or None in read else False
