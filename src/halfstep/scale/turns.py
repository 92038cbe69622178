"""What has happened since the last update: one turn per optimizer, and verdicts from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.errors import ScaleError
from halfstep.scale.finite import names_of
from halfstep.scale.turn import Stage, Turn

__all__ = ["Turns"]


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

    def now(
        self, optimizer: torch.optim.Optimizer, method: str, *, unfollowed: int, names: Mapping[Tensor, str] | None
    ) -> Turn:
        """Return the turn of `optimizer` after a look at what became of its gradients since it was unscaled.

        A new turn if it was skipped by hand: all gradients are late. The verdict of the old one still counts.

        Args:
            optimizer: whose turn.
            method: "unscale_" or "step", for messages.
            unfollowed: how many losses have been scaled in compiled code so far.
            names: of parameters, for messages.

        Raises:
            ScaleError: a gradient is a sum of unscaled and scaled ones, or is to be stepped and may be either.
        """
        turn = self.of(optimizer, method)
        if turn.stage is not Stage.UNSCALED or turn.is_as_unscaled(unfollowed):
            return turn
        mixed, late, others = turn.sort()
        kind = type(optimizer).__name__
        remedy = "Run every backward pass before unscale_(), and call update() also after a step that you skip by hand"
        if mixed:
            raise ScaleError(
                f"{method}(): unscale_() has been called on this {kind}, and a scaled loss was then added to unscaled "
                f"gradients: {', '.join(names_of(optimizer, mixed, names))}. {remedy}"
            )
        if others and method == "step" and turn.is_unclear(unfollowed):
            raise ScaleError(
                f"{method}(): this {kind} has gradients that came after unscale_(), and it is not known whether they "
                f"are scaled. {remedy}"
            )
        if late and not others:
            if turn.found is not None:
                self.record(turn.found)
            turn = self._turns[id(optimizer)] = Turn(optimizer)
        return turn

    def unscaled(self) -> list[Turn]:
        """Return the turns whose optimizers were unscaled and not stepped."""
        return [turn for turn in self._turns.values() if turn.stage is Stage.UNSCALED]

    def record(self, found: Tensor) -> None:
        """Add a verdict that belongs to no optimizer: 0-dim, fp32 or bool, on the scale's device."""
        self._recorded = found if self._recorded is None else torch.maximum(self._recorded, found)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that had a turn."""
        return [turn.optimizer for turn in self._turns.values()]

    def verdict(self) -> Tensor | None:
        """Return the worst of all verdicts, 0-dim, fp32 or bool, without reading it; None without any gradient."""
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
