"""Board: the candidates of a search, what was measured of each, and which is the best so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import halfstep as hs
from halfstep.advise.tune.calibration import applied
from halfstep.advise.tune.lab import Lab
from halfstep.advise.tune.proof import BASELINE
from halfstep.advise.tune.race import Lap, RaceResult
from halfstep.advise.tune.result import Change, Tried
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.timing import Ratio

SAFE = "O0"  # the preset that computes in fp32: the choice when nothing else is shown to be good

PRESETS = ("O0", "torch", "mixed", "O2", "pure", "lean")
"""The presets of a search, the safer first: a later one has to be better by more than a race resolves."""

WRONG = 0.1
"""Error of the gradients above which a candidate has to be looked at: healthy bf16 models stay below a twentieth."""

GROUP = 8  # candidates of one race at most, its base not counted: all of them are in memory at once
COMPILED = " compiled"  # behind the label of a candidate with ``compile=True``


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """How much time and memory count; they add up to 1."""

    time: float
    memory: float

    def cost(self, time: float, memory: float) -> float:
        """Return the logarithm of the weighted geometric mean of two ratios."""
        return sum(w * math.log(x) for w, x in ((self.time, time), (self.memory, memory)) if w)


class Board:
    """What is known of every candidate."""

    def __init__(self, lab: Lab, weights: Weights, steps: int) -> None:
        self.lab, self.weights, self.steps = lab, weights, steps
        self.bound = math.nan  # largest loss rise, a fraction of fp32's loss
        self.tried: dict[str, Tried] = {FP32: Tried(label=FP32, policy=hs.Policy.of(SAFE), preset=SAFE)}
        self.best = self.add(hs.Policy.of(SAFE), SAFE).label
        self.control: Ratio | None = None  # fp32 over fp32, of the last race
        self.resolution = 0.0
        self.repeatable = True  # whether two trainings in fp32 from one start had the same losses in every race
        self.laps: dict[str, Lap] = {}  # the last one of each candidate

    def __getitem__(self, label: str) -> Tried:
        return self.tried[label]

    def add(
        self, policy: hs.Policy, preset: str, changes: tuple[Change, ...] = (), *, compile: bool = False
    ) -> Tried:  # fmt: skip
        """Return the candidate with this policy, new or known."""
        for tried in self.tried.values():
            same = tried.policy.replace(name="") == policy.replace(name="")
            if same and tried.compile == compile and tried.label != FP32:
                return tried
        name = preset if preset == SAFE else f"{preset} {policy.dtype}"
        if changes:
            words = ", ".join(str(change).replace(" = ", " ") for change in changes)
            name += f" + {words}" if len(changes) <= 2 else f" + {len(changes)} changes"
        label, number = name + COMPILED * compile, 1
        while label in self.tried:
            number += 1
            label = f"{name} ({number}){COMPILED * compile}"
        self.tried[label] = Tried(label=label, policy=policy, preset=preset, compile=compile, changes=changes)
        return self.tried[label]

    def changed(self, base: Tried, changes: Sequence[Change]) -> Tried:
        """Return `base` with some changes more."""
        new = (replace(change, value=str(change.value)) for change in changes)
        return self.add(applied(base.policy, changes), base.preset, (*base.changes, *new))

    def set(self, label: str, **fields: Any) -> Tried:
        """Replace fields of a candidate."""
        self.tried[label] = replace(self.tried[label], **fields)
        return self.tried[label]

    def candidate(self, label: str) -> Candidate:
        """Return a candidate as tasks have it."""
        tried = self.tried[label]
        return Candidate(label=label, dtype=tried.policy.dtype, policy=tried.policy, compile=tried.compile)

    def race(
        self, labels: Sequence[str], steps: int, *, judged: bool = True, base: str = FP32, **options: Any
    ) -> bool:  # fmt: skip
        """Race candidates, and return whether the race came to its end; `judged`: it is long enough for the loss."""
        others = [label for label in dict.fromkeys(labels) if label != base]
        for start in range(0, len(others), GROUP):
            group = [*([] if base == FP32 else [base]), *others[start : start + GROUP]]
            found = self.lab.race([self.candidate(x) for x in group], steps, base=base, **options)
            if found is not None:
                self._take(found, group, base, judged=judged)
            if found is None or not found.finished:
                return False
        return True

    def _take(self, found: RaceResult, labels: Sequence[str], base: str, *, judged: bool) -> None:
        for label in (FP32, *labels):
            state, saved = self.lab.bytes(BASELINE if label == FP32 else self.candidate(label))
            self.set(label, state_bytes=state, saved_bytes=saved)
        if found.control is not None:
            self.control, self.resolution = found.control, found.control.resolution
        self.repeatable &= found.repeatable
        self.laps.update(found.laps)
        fp32 = found.laps[FP32]
        self.set(FP32, time=fp32.time, milliseconds=fp32.milliseconds, error=0.0, loss_rise=0.0, verdict="within",
                 reason="what the others are compared with")  # fmt: skip
        for label in labels:
            self._judge(label, found, base, judged=judged)

    def _judge(self, label: str, found: RaceResult, base: str, *, judged: bool) -> None:
        lap, before = found.laps[label], self.tried[label]
        if lap.time is not None:
            self.set(label, time=lap.time, milliseconds=lap.milliseconds)
        if lap.failed:
            self.set(label, verdict="failed", reason=lap.failed)
        elif lap.dropped:
            if before.verdict == "unmeasured":
                self.set(label, verdict="slower", reason=_over(lap.beside, base))
        elif judged and found.finished:
            rise = found.rise(label)
            skipped = f"{lap.skipped} steps skipped" if lap.skipped else ""
            reason = f"loss {100 * rise:+.2f} % beside fp32's, at most {100 * self.bound:+.2f} % allowed"
            if math.isnan(rise):
                reason, skipped = "its loss cannot be compared: fp32 ends at 0", ""
            elif math.isinf(rise):
                reason, skipped = "its loss is not finite", f" ({skipped})" * bool(skipped)
            elif skipped:
                skipped = f", {skipped}"
            self.set(label, loss_rise=rise, verdict="within" if rise <= self.bound else "worse",
                     reason=reason + skipped)  # fmt: skip
        elif before.verdict == "unmeasured":
            self.set(label, reason=_over(lap.beside, base))
        now = self.tried[label]
        words = [now.verdict, _over(lap.time, FP32), now.reason]
        self.lab.say(f"{label}: {'; '.join(dict.fromkeys(words))}")

    def cost(self, tried: Tried) -> float:
        """Return the logarithm of its cost over fp32's; inf if it is not known."""
        fp32 = self.tried[FP32]
        if (tried.time is None and self.weights.time) or (tried.bytes <= 0 and self.weights.memory):
            return math.inf
        memory = tried.bytes / fp32.bytes if fp32.bytes else math.inf
        return self.weights.cost(1.0 if tried.time is None else tried.time.median, memory)

    def cheaper(self, tried: Tried, other: Tried) -> bool:
        """Return whether it costs less by more than the last race resolves."""
        return self.cost(tried) < self.cost(other) - self.weights.time * self.resolution

    def prefer(self, label: str) -> None:
        """Make a candidate the best, if it is sound and cheaper."""
        if self.sound(self.tried[label]) and self.cheaper(self.tried[label], self.tried[self.best]):
            self.best = label

    def sound(self, tried: Tried) -> bool:
        """Return whether its loss is within the bound and its gradients are not far off, as far as is known."""
        return tried.verdict == "within" and not tried.error > WRONG

    def rank(self, tried: Tried) -> tuple[bool, bool, float]:
        """Return a place in the order of candidates: the best, then the sound ones, the cheapest first."""
        return tried.label != self.best, not self.sound(tried) and tried.label != SAFE, self.cost(tried)

    def measured(self) -> tuple[Tried, ...]:
        """Return fp32 and every candidate that was measured, with their reasons complete."""
        for label, tried in self.tried.items():
            if tried.error > WRONG and tried.verdict in {"within", "worse"}:
                self.set(label, reason=f"{tried.reason}; its gradients are off by {100 * tried.error:.0f} %")
        every = self.tried.values()
        return tuple(t for t in every if t.verdict != "unmeasured" or t.time is not None or t.label == FP32)

    def saves(self, tried: Tried, base: Tried) -> bool:
        """Return whether it is cheaper than `base`, the base of its last race, for certain."""
        beside = self.laps[tried.label].beside
        memory = tried.bytes / base.bytes if tried.bytes and base.bytes else math.inf
        if beside is None or tried.verdict in {"failed", "slower"}:
            return False
        likely, least = self.weights.cost(beside.median, memory), self.weights.cost(beside.high, memory)
        return least < 0.0 and likely < -self.weights.time * self.resolution

    def beside(self, label: str) -> float:
        """Return its step time over that of the base in its last race; 1.0 if it was not timed."""
        beside = self.laps[label].beside if label in self.laps else None
        return 1.0 if beside is None else beside.median


def _over(ratio: Ratio | None, what: str) -> str:
    if ratio is None:
        return "not timed"
    return f"{ratio.median:.3f} of {what}'s time ({ratio.low:.3f} to {ratio.high:.3f}, {ratio.rounds} rounds)"
