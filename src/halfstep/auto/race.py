"""Elimination: a race in which slower candidates are dropped as soon as their paired ratios show it.

Note [ties]: a candidate replaces one that is preferred to it only if it is faster by more than `MARGIN` with
confidence: the upper end of the interval of their paired ratio counts. It is dropped once the lower end shows that it
is not. So every pair ends in one of the two, unless rounds or time are up: then the preferred one stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from halfstep.timing import Race, Ratio

MARGIN = 0.01  # a smaller gain does not pay for less precise numbers, or for code that is compiled again
CLEAR = {1: 4.0, 2: 0.5, 3: 0.2, 4: 0.1}
"""Rounds -> how far all ratios must lie beyond the margin: one time may be disturbed by anything. With five rounds the
interval is the range of the ratios, and those of equal candidates lie on one side of 1 in one case of 16."""

FUTILE, CLOSE = 8, 0.03
"""After so many rounds a median within the margin is enough, if the interval ends less than this below 1."""


class Elimination(Race):
    """A race with preferences, of `most` rounds, none of which begins after `seconds`; all of them are timed."""

    def __init__(
        self,
        measure: Callable[[str, int], float],
        *,
        most: int,
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(measure)
        self._most, self._seconds, self._clock = most, seconds, clock
        self.names: list[str] = []  # the candidates that are left, in the order of preference
        self.rounds = 0

    def eliminate(self, names: Sequence[str], most: int | None = None) -> None:
        """Race until one candidate is left, or rounds or time are up; those that are preferred come first."""
        self.names = [name for name in names if name not in self.dropped]
        begun, least = self._clock(), self.rounds + 1
        while len(self.names) > 1 or self.rounds < least:
            if self.rounds >= (self._most if most is None else min(most, self._most)):
                return
            if self.rounds >= least and self._clock() - begun > self._seconds:
                return
            self.round(self.names, self.rounds)
            self.names = [name for name in self.names if name not in self.dropped]
            self.rounds += 1
            self._drop_slower()

    def order(self, names: list[str], number: int) -> list[str]:
        """Return each candidate in each place in turn, the preferred one first in the first round."""
        shift = number % max(1, len(names))
        return [*names[shift:], *names[:shift]]

    def faster(self, name: str, preferred: str) -> bool | None:
        """Return whether `name` replaces `preferred`, see note [ties]; None if that is not known."""
        ratio = self.ratio(name, preferred)
        if ratio is None:
            return None
        beyond = CLEAR.get(ratio.rounds, 0.0)
        if ratio.high < (1.0 - MARGIN) / (1.0 + beyond):
            return True
        if ratio.low > (1.0 - MARGIN) * (1.0 + beyond):
            return False
        futile = ratio.rounds >= FUTILE and ratio.median > 1.0 - MARGIN and ratio.low > 1.0 - CLOSE
        return False if futile else None

    def over(self, name: str, base: str, seen: tuple[str, ...] = ()) -> Ratio | None:
        """Return the ratio of two candidates' steps; if they had no round in common, by way of others that had some.

        The interval of such a product is the widest that the intervals of its factors allow. None: there is no way.
        """
        direct = self.ratio(name, base)
        if direct is not None:
            return direct
        for other in self.times.keys() - {name, base, *seen}:
            one, rest = self.ratio(name, other), self.over(other, base, (*seen, name))
            if one is not None and rest is not None:
                rounds, median = min(one.rounds, rest.rounds), one.median * rest.median
                return Ratio(median=median, low=one.low * rest.low, high=one.high * rest.high, rounds=rounds)
        return None

    def best(self) -> str:
        """Return the candidate that replaces all that are preferred to it; "" if none is left."""
        best = ""
        for name in self.names:
            if not best or self.faster(name, best):
                best = name
        return best

    def _drop_slower(self) -> None:
        """Drop candidates that another one replaces, or that do not replace one that is preferred."""
        slower = set()
        for place, preferred in enumerate(self.names):
            for name in self.names[place + 1 :]:
                faster = self.faster(name, preferred)
                if faster is not None:
                    slower.add(preferred if faster else name)
        if len(slower) < len(self.names):  # else ratios of different rounds contradict one another
            self.names = [name for name in self.names if name not in slower]
