"""Paired ratios: two programs are timed in turns, and only times of one round are compared.

What disturbs a machine disturbs neighbours in time alike: identical code differs by several per cent in unpaired
medians and by tenths of a per cent in paired ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CONFIDENCE", "Ratio", "paired_ratio"]

CONFIDENCE = 0.90  # of every interval; a 90 % interval inside a margin is equivalence at the 5 % level


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """The median of paired ratios and its 90 % interval (from order statistics: no distribution assumed)."""

    median: float  # candidate's time over the baseline's in the same round
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    rounds: int  # how many pairs

    def finer_than(self, control: Ratio) -> bool:
        """Return whether this ratio differs from 1 by less than `control`, a pair of identical programs, may."""
        resolution = max(abs(control.low - 1.0), abs(control.high - 1.0))
        return abs(self.median - 1.0) <= resolution or self.low <= 1.0 <= self.high


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return the median of ``times[i] / baseline[i]``; seconds, one pair a round."""
    ratios = sorted(a / b for a, b in zip(times, baseline, strict=True))
    count = len(ratios)
    # the median lies between the order statistics n/2 -+ z * sqrt(n)/2 (binomial, normal approximation)
    half = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))
    return Ratio(median=statistics.median(ratios), low=ratios[low], high=ratios[high], rounds=count)
