"""The result behind a speed: does a candidate's loss stay as near to fp32's as torch.amp's does?

Every candidate starts from the same weights and sees the same batches in the same order, so each step's loss has a
partner in fp32. A candidate's *deviation* is the root mean square, over the first 50 steps, of its loss minus fp32's;
torch.amp's deviation from the same start is the spread that low formats bring. A candidate is *within the spread* if
its deviation is at most `FACTOR` times that, and every loss is finite.

Rounding errors grow along a trajectory, so torch.amp's own deviation differs from start to start. `spread_of` measures
by how much; `FACTOR` is the largest ratio between two of its starts that was seen (LeNet-5). It is far from idle: a
learning rate that is wrong by a twentieth exceeds it (tests/benchmarks/test_curves.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 50
FACTOR = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A loss curve beside fp32's.

    Attributes:
        steps: how many were compared.
        last: the loss of the last of them.
        deviation: root mean square of loss minus fp32's loss, nats.
        largest: the largest distance at one step.
        of_spread: deviation over torch.amp's.
        within: whether that is at most `FACTOR`.
    """

    steps: int
    last: float
    deviation: float
    largest: float
    of_spread: float
    within: bool


def deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the root mean square of the differences; inf if a loss is not finite."""
    squares = [(a - b) ** 2 for a, b in zip(losses, reference, strict=True)]
    return math.sqrt(sum(squares) / len(squares)) if all(map(math.isfinite, squares)) else math.inf


def judge(losses: Sequence[float], reference: Sequence[float], spread: Sequence[float]) -> Curve:
    """Compare a loss curve with fp32's.

    Args:
        losses: of the candidate, one a step.
        reference: of fp32, the same steps.
        spread: of torch.amp, the same steps.
    """
    steps = min(STEPS, len(losses), len(reference), len(spread))
    losses, reference, spread = losses[:steps], reference[:steps], spread[:steps]
    own, allowed = deviation(losses, reference), deviation(spread, reference)
    share = own / allowed if allowed else math.inf if own else 0.0
    return Curve(
        steps=steps,
        last=losses[-1],
        deviation=own,
        largest=max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
        of_spread=share,
        within=share <= FACTOR,
    )
