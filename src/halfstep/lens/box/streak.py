"""Streaks: what many bad steps have in common, and which of a streak are to be explained without being asked about.

Under a dynamic scale most bad steps are its search for the right value. The third in a row is examined: a replay at a
lower scale decides whether to wait, or whether gradients are not finite at any scale (`Streak.helps`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from halfstep.lens.verdict import Verdict

__all__ = ["LOW_SCALE", "SkippedStep", "Streak"]

LOW_SCALE = 2.0**8  # a larger dynamic scale that overflows once is left alone: it is still falling
THIRD = 3  # bad steps in a row that are examined under any scale; then twice as many each time, for data may change
STREAK = 10  # a streak of so many bad steps is reported
LONG_STREAK = 20  # the same under a dynamic scale, which skips 24 steps from 2**24 to 1; most begin at 2**16


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """What is known without a replay of a step whose gradients were not finite."""

    loss_finite: bool
    scaling: str  # "none", "static" or "dynamic"
    scale: float
    floor: float  # the lowest the scale can be; 0.0 if that is not known
    low: str  # the low format
    state_finite: bool  # weights and optimizer state; read every `LOOK_EVERY` steps
    applied: bool = False  # whether its update was applied to the weights


@dataclass(eq=False)
class Streak:
    """Recognises what many bad steps have in common, and reports each diagnosis once."""

    reported: set[str] = field(default_factory=set)  # names of the diagnoses made so far
    streak: int = 0  # steps in a row whose gradients were not finite
    losses: int = 0  # steps in a row whose loss was not finite under finite gradients
    verdict: Verdict | None = None  # that on a step of the streak, if one was explained
    helps: float | None = None  # the loss scale at which a replay of the streak was finite; 0.0: none, None: not tried

    def fine(self) -> None:
        """Count an applied step with a finite loss."""
        self.streak = self.losses = 0

    def lost(self, *, applied: bool = True) -> list[str]:
        """Count a step whose loss was not finite under finite gradients; return what has not been reported before."""
        self.streak = 0
        self.losses += 1
        found = [(
            "the loss is not finite while gradients are",
            f"the update was {'applied, as torch.amp does' if applied else 'not applied: the loop has left it out'}; "
            "the loss shows nothing now, and a term of it trains nothing. "
            "Compute that term in fp32, or keep it where the format ends (step.explain() names the operator)",
        )]  # fmt: skip
        if self.losses == STREAK:
            found.append((
                f"{STREAK} steps in a row had a loss that is not finite and gradients that are",
                "no loss curve, early stopping or best checkpoint can be trusted; training itself goes on",
            ))  # fmt: skip
        return self._new(found)

    def skipped(self) -> None:
        """Count a step whose gradients were not finite."""
        self.streak += 1
        self.losses = 0
        if self.streak == 1:
            self.verdict = self.helps = None

    @property
    def undecided(self) -> bool:
        """Whether the streak has come to a step that is examined under any scale: the 3rd, 6th, 12th and so on."""
        times, rest = divmod(self.streak, THIRD)
        return self.verdict is None and not rest and times > 0 and not times & (times - 1)

    def see(self, step: SkippedStep) -> list[str]:
        """Return what has not been reported before about a bad step that `skipped` has counted."""
        return self._new(self._diagnoses(step))

    def _new(self, diagnoses: Iterable[tuple[str, str]]) -> list[str]:
        found = []
        for name, text in diagnoses:
            if name not in self.reported:
                self.reported.add(name)
                found.append(f"{name}: {text}")
        return found

    def _diagnoses(self, seen: SkippedStep) -> Iterator[tuple[str, str]]:
        if not seen.state_finite:
            yield (
                "weights or optimizer state are not finite",
                "no step can be finite any more; load the last good checkpoint, and find the update that wrote them",
            )
            return
        dynamic = seen.scaling == "dynamic"
        if dynamic and seen.scale <= seen.floor * (1 + 1e-6):
            yield "the scale is at its floor", f"{seen.scale:g} cannot get lower; {self._reason()}"
        elif dynamic and self.helps and self.helps < 1.0:
            yield (
                "the loss is too large for fp16 gradients",
                f"at a loss scale of 1 they overflow too, and at {self.helps:g} they are finite; a dynamic scale gets "
                "there by skipping steps, and a smaller loss (a mean for a sum) skips none",
            )
        if self.streak == (LONG_STREAK if dynamic and seen.scale > 1.0 else STREAK):
            if seen.applied:
                yield f"the gradients of {self.streak} steps in a row were not finite", self._reason()
            else:
                yield f"{self.streak} steps in a row were skipped", f"training stands still; {self._reason()}"
        if self.streak >= 2 and seen.low == "bf16" and seen.scaling == "none" and not seen.applied:
            yield (
                "bf16 skips steps",
                f"bf16 reaches as far as fp32, so fp32 would overflow too, or a value is invalid; {self._reason()}",
            )
        if not seen.loss_finite and self.streak >= 2 and not seen.applied:
            yield (
                "the loss is not finite",
                f"skipping leaves weights as they are, so the same data gives the same; {self._reason()}",
            )

    def _reason(self) -> str:
        """Return what is known of the reason of a streak."""
        verdict = self.verdict
        if verdict is not None and verdict.kind == "bad_batch":
            return f"look at the batch: {verdict.headline}"
        if verdict is not None and verdict.kind != "not_reproducible":
            return f"the verdict on step {verdict.step} has the reason and what helps"
        if self.helps:
            return f"a replay was finite at a loss scale of {self.helps:g}"
        return "the reason is not known yet (step.explain() looks for it)"
