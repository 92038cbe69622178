"""A lab that measures nothing: times, loss rises, audits and proofs are given, so that a search can be followed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration, Spot
from halfstep.advise.tune.lab import Lap, RaceResult, Reference
from halfstep.advise.tune.proof import Proof, Run
from halfstep.tasks.candidates import FP32, Candidate
from halfstep.timing import Ratio
from tests.tasks.small import small_task

REFERENCE = Reference(start=(3.0, 3.1, 2.9), end=(1.0, 1.02, 0.98))


def spot(op: str, module: str = "", **fields: Any) -> Spot:
    """Return a spot of a low product that loses little, with some fields replaced."""
    plain: dict[str, Any] = {
        "kind": "Linear", "format": "bf16", "error": 2e-3, "headroom": 120.0, "overflows": False,
        "time": 0.1, "cast_bytes": 0, "bytes": 1000,
    }  # fmt: skip
    return Spot(module=module, op=op, **{**plain, **fields})


def ratio(median: float) -> Ratio:
    """Return a ratio that a quiet machine resolves to half a per cent."""
    return Ratio(median=median, low=0.995 * median, high=1.005 * median, rounds=40)


def proof(verdict: str, more: int = 0) -> Proof:
    """Return a proof with a verdict."""
    return Proof(
        verdict=verdict, reason=f"by decree{f', needs {more} more seeds' * bool(more)}", measure="training loss",
        higher_is_better=False, margin=0.01, margin_from="", difference=None, fp32=(1.0,), values=(1.0,),
        seeds_more=more, seconds_more=60.0 * more, steps=40, loss_steps=(), fp32_losses=(), losses=(), skipped=(),
    )  # fmt: skip


@dataclass
class FakeLab:
    """What `Search` asks of a lab.

    Attributes:
        time: policy, compile -> step time over fp32's.
        rise: policy -> loss rise.
        proofs: candidate -> the proof's verdict.
        spots: of every audit.
        failing: policy -> error of its race, "" for none.
        size: policy -> bytes kept for backward.
        error: policy -> error of the gradients.
        skipped: policy -> steps that were not applied.
        left: seconds; a race takes none of them, and none is run without.
    """

    time: Callable[[hs.Policy, bool], float]
    rise: Callable[[hs.Policy], float] = lambda policy: 0.0
    proofs: Callable[[Candidate], Proof] = lambda candidate: proof("equivalent")
    spots: Sequence[Spot] = ()
    failing: Callable[[hs.Policy], str] = lambda policy: ""
    size: Callable[[hs.Policy], int] = lambda policy: 1000
    error: Callable[[hs.Policy], float] = lambda policy: 0.01
    skipped: Callable[[hs.Policy], int] = lambda policy: 0
    left: float = 1e6
    seconds: float = 1e6
    seed: int = 0
    repeatable: bool = True
    task: hs.Task = field(default_factory=lambda: small_task(excerpt_steps=40))
    said: list[str] = field(default_factory=list)
    raced: list[str] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)

    device = "cpu"

    def race(self, candidates: Sequence[Candidate], *, base: str = FP32, limit: float = math.inf, alone: bool = False,
             reserve: float = 0.0, **options: Any) -> RaceResult | None:  # fmt: skip
        """Return a race as decreed."""
        if self.left <= reserve:
            return None
        self.raced += [c.label for c in candidates]
        times = {FP32: 1.0}
        for c in candidates:
            assert c.policy is not None
            times[c.label] = self.time(c.policy, c.compile)
        laps = {} if alone else {FP32: Lap(time=ratio(1.0), beside=None, milliseconds=10.0)}
        for c in candidates:
            assert c.policy is not None
            beside, failed = ratio(times[c.label] / times[base]), self.failing(c.policy)
            laps[c.label] = Lap(
                time=None if alone else ratio(times[c.label]), beside=beside, milliseconds=10.0 * times[c.label],
                dropped=beside.low > limit and not failed, failed=failed,
            )  # fmt: skip
        control = None if alone else ratio(1.0)
        return RaceResult(laps=laps, control=control, repeatable=self.repeatable, finished=True)

    def training(self, candidate: Candidate, steps: int, bound: float | None, *, reserve: float) -> Run | None:
        """Return a training that ends as decreed."""
        if self.left <= reserve:
            return None
        assert candidate.policy is not None
        self.trained.append(candidate.label)
        end = 1.0 + self.rise(candidate.policy)
        return Run(
            policy="", compile=False, measure="loss", steps=steps, seed=0, start=3.0, value=end, losses=(),
            skipped=self.skipped(candidate.policy), seconds=1.0, last_loss=end if math.isfinite(end) else math.nan,
        )  # fmt: skip

    def bytes(self, candidate: Candidate) -> tuple[int, int]:
        """Return bytes between steps and for backward."""
        return 1000, 1000 if candidate.policy is None else self.size(candidate.policy)

    def calibration(self, candidate: Candidate, steps: int) -> Calibration:
        """Return the audit with the given spots."""
        return Calibration(spots=tuple(self.spots))

    def probe(self, policy: hs.Policy, steps: int, *, reserve: float) -> float:
        """Return the error of the gradients as decreed."""
        return self.error(policy)

    def prove(self, candidate: Candidate, steps: int, *, bound: float | None, seeds: int) -> Proof:
        """Return the proof as decreed."""
        return self.proofs(candidate)

    def pace(self) -> float:
        """Return the seconds of a step."""
        return 0.01

    def say(self, note: str = "", phase: str = "") -> None:
        """Note what would be shown."""
        self.said.append(note)
