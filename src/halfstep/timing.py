"""Timing in turns: candidates run once a round, and only times of one round are compared.

What disturbs a machine disturbs neighbours in time alike: identical code differs by several per cent in unpaired
medians and by tenths of a per cent in paired ratios.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["CONFIDENCE", "WARM_UP", "Race", "Ratio", "Unfit", "paired_ratio", "ratio_of", "timed", "wait_for"]

CONFIDENCE = 0.90  # of every interval; a 90 % interval inside a margin is equivalence at the 5 % level

WARM_UP = 3
"""First rounds of a race, which are not timed: optimizer state and caches are made in the first, what compiles compiles
in the first two, and kernels are chosen on first use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """The median of paired ratios and its 90 % interval (from order statistics: no distribution assumed)."""

    median: float  # candidate's time over the baseline's in the same round
    low: float  # lower end of the interval, at most the median
    high: float  # upper end of the interval, at least the median
    rounds: int  # how many pairs, at least one

    def __format__(self, spec: str) -> str:
        """Return the median and its interval, each as `spec` says: ``0.56 [0.55, 0.57]``."""
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    @property
    def resolution(self) -> float:
        """How far from 1 the interval reaches: what a pair of identical programs does not resolve."""
        return max(abs(self.low - 1.0), abs(self.high - 1.0))

    def times(self, other: "Ratio") -> "Ratio":
        """Return the ratio of two by way of a third; its interval is the widest that those of the factors allow."""
        rounds, median = min(self.rounds, other.rounds), self.median * other.median
        return Ratio(median=median, low=self.low * other.low, high=self.high * other.high, rounds=rounds)

    def finer_than(self, control: "Ratio") -> bool:
        """Return whether this ratio differs from 1 by less than `control`, a pair of identical programs, may."""
        return abs(self.median - 1.0) <= control.resolution or self.low <= 1.0 <= self.high


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return the median of ``times[i] / baseline[i]``; seconds, one pair a round.

    Raises:
        ValueError: there is no pair, or the two differ in length.
    """
    ratios = sorted(a / b for a, b in zip(times, baseline, strict=True))
    if not ratios:
        raise ValueError("paired_ratio: no round in which both were timed; time at least one")
    count = len(ratios)
    # the median lies between the order statistics n/2 -+ z * sqrt(n)/2 (binomial, normal approximation)
    half = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))
    return Ratio(median=statistics.median(ratios), low=ratios[low], high=ratios[high], rounds=count)


def wait_for(device: str | torch.device) -> None:
    """Wait until a device has done what it was given, so that a clock can be read."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def timed(
    run: Callable[[], object], device: str | torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds that `run` takes until `device` is done with it."""
    wait_for(device)
    begun = clock()
    run()
    wait_for(device)
    return clock() - begun


class Unfit(Exception):
    """A candidate leaves the race; the message is the reason."""


class Race:
    """Times of candidates by round.

    ``measure(name, number)`` runs a candidate in round `number` and returns its seconds; it may raise `Unfit`. `order`
    shuffles the candidates of each round with `seed`.
    """

    def __init__(self, measure: Callable[[str, int], float], *, seed: int = 0) -> None:
        self._measure, self._shuffle = measure, random.Random(seed)
        self.times: dict[str, dict[int, float]] = {}  # candidate -> round -> seconds
        self.dropped: dict[str, str] = {}  # candidate -> reason, of those that left the race

    def round(self, names: Iterable[str], number: int, *, timed: bool = True) -> None:
        """Run each candidate of `names` once, without those that left; their times are kept if `timed`."""
        for name in self.order([name for name in names if name not in self.dropped], number):
            try:
                seconds = self._measure(name, number)
            except Unfit as reason:
                self.dropped[name] = str(reason)
            else:
                if timed:
                    self.times.setdefault(name, {})[number] = seconds

    def order(self, names: list[str], number: int) -> Sequence[str]:
        """Return the order of candidates in a round."""
        self._shuffle.shuffle(names)
        return names

    def run(
        self, names: Sequence[str], *, seconds: float, least: int, most: int,
        clock: Callable[[], float] = time.perf_counter, on_share: Callable[[float], None] = lambda share: None,
    ) -> None:  # fmt: skip
        """Warm up, then run from `least` to `most` rounds for `seconds`; `on_share` gets the share gone, 0 to 1."""
        for number in range(WARM_UP):
            self.round(names, number, timed=False)
        begun = clock()
        for number in range(most):
            gone = (clock() - begun) / seconds if seconds else 1.0
            on_share(min(1.0, gone))
            if number >= least and gone >= 1.0:
                break
            self.round(names, WARM_UP + number)

    def ratio(self, name: str, base: str, *, plus: float = 0.0) -> Ratio | None:
        """Return the paired ratio of two candidates (`plus` seconds on the base); None without a round in common."""
        return ratio_of(self.times.get(name, {}), self.times.get(base, {}), plus=plus)

    def typical(self, name: str) -> float:
        """Return the median seconds of a candidate; nan if it was not timed."""
        found = self.times.get(name)
        return statistics.median(found.values()) if found else math.nan


def ratio_of(times: Mapping[int, float], baseline: Mapping[int, float], *, plus: float = 0.0) -> Ratio | None:
    """Return the paired ratio of seconds by round; None if no round is in both."""
    common = sorted(times.keys() & baseline.keys())
    return paired_ratio([times[i] for i in common], [baseline[i] + plus for i in common]) if common else None
