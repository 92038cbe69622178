"""Trouble: what many steps have in common: named diagnoses, each said once, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from halfstep.events import Verdict

__all__ = ["Seen", "Trouble"]

STREAK = 10  # steps in a row: a scale on its way down from 2**24 to 1 takes 24, most begin at 2**16 and need few
LONG_STREAK = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a step that was not applied, without a replay."""

    loss_finite: bool
    scaling: str  # "none", "static" or "dynamic"
    scale: float
    floor: float
    low: str  # the low format
    state_finite: bool  # weights and optimizer state; looked at now and then
    verdict: Verdict | None = None  # on the first step of the streak


@dataclass(eq=False)
class Trouble:
    """Recognises repeated trouble.

    Attributes:
        said: names of the diagnoses made so far.
        streak: steps in a row that were not applied.
        losses: steps in a row that were applied and whose loss was not finite.
    """

    said: set[str] = field(default_factory=set)
    streak: int = 0
    losses: int = 0

    def fine(self) -> None:
        """Take note of an applied step with a finite loss."""
        self.streak = self.losses = 0

    def lost(self) -> list[str]:
        """Take note of an applied step whose loss was not finite; return what has not been said before."""
        self.streak = 0
        self.losses += 1
        return self._new(self._of_losses())

    def skipped(self) -> None:
        """Take note of a step that was not applied."""
        self.streak += 1
        self.losses = 0

    def see(self, seen: Seen) -> list[str]:
        """Return what has not been said before of a step that was not applied, which `skipped` has counted."""
        return self._new(self._diagnoses(seen))

    def _new(self, diagnoses: Iterator[tuple[str, str]]) -> list[str]:
        found = []
        for name, text in diagnoses:
            if name not in self.said:
                self.said.add(name)
                found.append(f"{name}: {text}")
        return found

    def _of_losses(self) -> Iterator[tuple[str, str]]:
        yield (
            "the loss is not finite while gradients are",
            "the update was applied, as torch.amp does; what the loss says is lost, and a term of it trains nothing. "
            "Compute that term in fp32, or keep it where the format ends (step.explain() names the operator)",
        )
        if self.losses == STREAK:
            yield (
                f"{STREAK} steps in a row had a loss that is not finite and gradients that are",
                "no loss curve, early stopping or best checkpoint can be trusted; training itself goes on",
            )

    def _diagnoses(self, seen: Seen) -> Iterator[tuple[str, str]]:
        if not seen.state_finite:
            yield (
                "weights or optimizer state are not finite",
                "no step can be finite any more; load the last good checkpoint, and find the update that wrote them",
            )
            return
        dynamic = seen.scaling == "dynamic"
        if dynamic and seen.scale <= seen.floor * (1 + 1e-6):
            yield (
                "the scale is at its floor",
                f"{seen.scale:g} cannot get lower and gradients still overflow: the numbers do not fit fp16; use bf16, "
                "or give what overflows fp32 (step.explain() names it)",
            )
        elif dynamic and seen.scale <= 1.0 and self.streak >= 2:
            yield (
                "not a scaling problem",
                f"gradients are not finite at scale {seen.scale:g}; a lower one does not help (explain() says why)",
            )
        if self.streak == (LONG_STREAK if dynamic and seen.scale > 1.0 else STREAK):
            yield (
                f"{self.streak} steps in a row were skipped",
                "training stands still; if the scale is not the reason, step.explain() names it",
            )
        if self.streak >= 2 and seen.low == "bf16" and seen.scaling == "none":
            yield (
                "bf16 skips steps",
                "bf16 reaches as far as fp32, so fp32 would overflow too, or a value is invalid: lower the learning "
                "rate, clip gradients, look at the data",
            )
        if not seen.loss_finite and self.streak >= 2:
            yield (
                "the loss is not finite",
                f"skipping leaves weights as they are, so the same data gives the same; {_where_to_look(seen.verdict)}",
            )


def _where_to_look(verdict: Verdict | None) -> str:
    if verdict is None or verdict.kind == "not_reproducible":
        return "look at the loss and the batch (explain() says more)"
    if verdict.kind == "bad_batch":
        return f"look at the batch: {verdict.headline}"
    return f"step {verdict.step} was the first, and the verdict on it says what helps"
