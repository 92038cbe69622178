"""What one optimizer has done since the last update, and what became of its gradients since it was unscaled."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from halfstep.scale.finite import gradients
from halfstep.scale.passes import Pass

__all__ = ["Stage", "Turn"]


class Stage(enum.Enum):
    """How far an optimizer has come since the last update."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass(slots=True)
class Turn:
    """What one optimizer has done since the last update.

    A parameter's gradient is *late* if all of it came from scaled losses after `unscale_`, and *mixed* if such a loss
    was added to a gradient that had been unscaled. Both are kept by ``id(parameter)``, so that they stay true when
    ``p.grad`` is replaced by a function of itself.

    Attributes:
        optimizer: kept alive until the next update.
        stage: how far it has come.
        found: 0-dim fp32 on the scale's device, not zero = bad; None = it had no gradients.
        bad: what the host read of `found`; None = it has not been read.
        late: parameters with a late gradient.
        mixed: parameters with a mixed gradient.
        running: backward passes of scaled losses that have begun since `unscale_` and not ended.
        first: the first gradient that was unscaled, as long as it lives.
        unfollowed: how many losses had been scaled in compiled code by then.
    """

    optimizer: torch.optim.Optimizer
    stage: Stage = Stage.READY
    found: Tensor | None = None
    bad: bool | None = None
    late: set[int] = field(default_factory=set)
    mixed: set[int] = field(default_factory=set)
    running: list[Pass] = field(default_factory=list)
    first: TensorWeakRef | None = None
    unfollowed: int = 0

    def mark_unscaled(self, unfollowed: int) -> None:
        """Note that the gradients there are now have been unscaled."""
        self.stage, self.unfollowed = Stage.UNSCALED, unfollowed
        first = self._first_gradient()
        self.first = None if first is None else TensorWeakRef(first)

    def is_as_unscaled(self, unfollowed: int) -> bool:
        """Return whether gradients were unscaled and no scaled loss has been differentiated since."""
        return (
            self.found is not None and unfollowed == self.unfollowed and not (self.late or self.mixed or self.running)
        )

    def is_unclear(self, unfollowed: int) -> bool:
        """Return whether gradients that no known loss made may be scaled ones."""
        if self.first is None:
            return True
        return unfollowed != self.unfollowed and self.first() is not self._first_gradient()

    def _first_gradient(self) -> Tensor | None:
        return next((gradient for _, gradient in gradients(self.optimizer)), None)

    def begin_pass(self) -> Pass:
        """Note the gradients there are when a backward pass begins."""
        begun = Pass(self.optimizer)
        if self.late or self.mixed:  # gradients that are gone
            empty = begun.empty()
            self.late -= empty
            self.mixed -= empty
        self.running.append(begun)
        return begun

    def end_pass(self, ended: Pass) -> None:
        """Note which gradients a backward pass has made, and to which it has added."""
        if ended not in self.running:
            return
        self.running.remove(ended)
        made, added = ended.changed()
        self.late |= made
        self.mixed -= made
        self.mixed |= added - self.late

    def sort(self) -> tuple[list[Tensor], bool, bool]:
        """Return the parameters with a mixed gradient, and whether there are late ones, and others."""
        for unfinished in list(self.running):  # an exception ended the pass
            self.end_pass(unfinished)
        present = [parameter for parameter, _ in gradients(self.optimizer)]
        ids = {id(parameter) for parameter in present}
        self.mixed &= ids
        self.late &= ids
        mixed = [parameter for parameter in present if id(parameter) in self.mixed]
        return mixed, bool(self.late), bool(ids - self.mixed - self.late)
