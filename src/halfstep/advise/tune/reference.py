"""Reference: fp32's short trainings with several seeds: whether a loss can be judged beside them, and within what."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from halfstep.tasks.measure import student_quantile

__all__ = ["Reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """fp32's short trainings, one a seed.

    Attributes:
        start: mean training loss over the first steps, one a seed.
        end: over the last steps.
        repeatable: whether two trainings with one seed had the same losses.
        milliseconds: of a step.
    """

    start: tuple[float, ...]
    end: tuple[float, ...]
    repeatable: bool
    milliseconds: float

    @property
    def noise(self) -> float:
        """Standard deviation of the end from seed to seed, as a fraction of its mean."""
        mean = abs(statistics.fmean(self.end))
        return statistics.stdev(self.end) / mean if mean else math.inf

    @property
    def finite(self) -> bool:
        """Whether all losses are."""
        return all(map(math.isfinite, (*self.start, *self.end)))

    def flaw(self, bound: float | None) -> str:
        """Return why no loss can be compared with these, "" if it can.

        The loss has to fall by a one-sided t test at the 5 % level, and by more than the bound lets it rise: else a
        policy that learns nothing could pass.
        """
        if not self.finite:
            return (
                "the loss of fp32 is not finite; no precision helps: lower the learning rate, or look at the data "
                "(hs.TrainStep(...).explain() names the operator)"
            )
        falls = [a - b for a, b in zip(self.start, self.end, strict=True)]
        mean, error = statistics.fmean(falls), statistics.stdev(falls) / math.sqrt(len(falls))
        shown = ", ".join(f"{a:.4g} -> {b:.4g}" for a, b in zip(self.start, self.end, strict=True))
        if not mean > student_quantile(0.95, len(falls) - 1) * error:
            return (
                f"the loss does not fall in fp32 ({shown}, one a seed), so that no policy can be judged by it; train "
                "longer (excerpt_steps), raise the learning rate, or look at the task"
            )
        allowed = (self.noise if bound is None else bound) * abs(statistics.fmean(self.end))
        if not mean > allowed:
            return (
                f"the loss falls by {mean:.3g} in fp32 ({shown}, one a seed), and a rise by {allowed:.3g} would be "
                "allowed, so that a policy that learns nothing could pass; train longer (excerpt_steps), or give a "
                "smaller max_loss_rise"
            )
        return ""
