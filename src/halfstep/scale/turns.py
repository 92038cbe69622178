"""What has happened since the last update: one turn per optimizer, and verdicts from elsewhere."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from halfstep.errors import ScaleError

__all__ = ["Stage", "Turn", "Turns"]


class Stage(enum.Enum):
    """How far an optimizer has come since the last update."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass(slots=True)
class Turn:
    """What one optimizer has done since the last update.

    Attributes:
        optimizer: kept alive until the next update.
        stage: how far it has come.
        found: 0-dim fp32 on the scale's device, not zero = bad; None = it had no gradients.
        bad: what the host read of `found`; None = nobody has read it.
        unscaled: the first gradient that was unscaled, as long as it lives.
        scalings: how often the scale had been asked for by then.
    """

    optimizer: torch.optim.Optimizer
    stage: Stage = Stage.READY
    found: Tensor | None = None
    bad: bool | None = None
    unscaled: TensorWeakRef | None = None
    scalings: int = 0

    def mark_unscaled(self, scalings: int) -> None:
        """Remember that the gradients there are now have been unscaled, after so many requests for the scale."""
        self.stage, self.scalings = Stage.UNSCALED, scalings
        first = _first_gradient(self.optimizer)
        self.unscaled = None if first is None else TensorWeakRef(first)

    def is_over(self, scalings: int) -> bool:
        """Return whether gradients were unscaled, never stepped, and others, scaled since, are in their place."""
        if self.stage is not Stage.UNSCALED or self.unscaled is None or scalings == self.scalings:
            return False
        first = _first_gradient(self.optimizer)
        return first is not None and self.unscaled() is not first


def _first_gradient(optimizer: torch.optim.Optimizer) -> Tensor | None:
    return next((p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None)


class Turns:
    """All turns since the last update."""

    def __init__(self) -> None:
        """Start with none."""
        self._turns: dict[int, Turn] = {}
        self._recorded: Tensor | None = None

    def __bool__(self) -> bool:
        """Say whether anything was unscaled, stepped or recorded."""
        return bool(self._turns) or self._recorded is not None

    def of(self, optimizer: torch.optim.Optimizer, method: str) -> Turn:
        """Return the turn of `optimizer`, a new one if it has none; `method` is for the message."""
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            kind = type(optimizer).__name__
            raise ScaleError(
                f"{method}(optimizer): got {kind}, which has no param_groups; pass a torch.optim.Optimizer"
            )
        return self._turns.setdefault(id(optimizer), Turn(optimizer))

    def again(self, optimizer: torch.optim.Optimizer, scalings: int) -> Turn:
        """Return the turn of `optimizer` for unscaling: a new one if the last was skipped by hand after unscaling."""
        turn = self.of(optimizer, "unscale_")
        if turn.is_over(scalings):  # its verdict counts, its gradients are gone
            if turn.found is not None:
                self.record(turn.found)
            turn = self._turns[id(optimizer)] = Turn(optimizer)
        return turn

    def record(self, found: Tensor) -> None:
        """Add a verdict that belongs to no optimizer: 0-dim, fp32 or bool, on the scale's device."""
        self._recorded = found if self._recorded is None else torch.maximum(self._recorded, found)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that had a turn."""
        return [turn.optimizer for turn in self._turns.values()]

    def verdict(self) -> Tensor | None:
        """Return the worst of all verdicts, 0-dim, fp32 or bool, without reading it; None if nobody had gradients."""
        found = self._recorded
        for turn in self._turns.values():
            if turn.found is not None:
                found = turn.found if found is None else torch.maximum(found, turn.found)
        return found

    def known(self) -> bool | None:
        """Return whether the host has read that the verdict is bad, or None if it has not read enough to know."""
        read = [turn.bad for turn in self._turns.values() if turn.found is not None]
        if any(read):
            return True
        return None if self._recorded is not None or None in read else False
