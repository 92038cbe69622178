"""Elimination: a race in which candidates are dropped as soon as their paired ratios show that they are slower.

Note [ties]: a candidate replaces one that is preferred to it if it is faster by more than `MARGIN` with confidence: the
upper end of the interval of their paired ratio counts. It is dropped once the lower end shows that it is not. A pair
that the turns of the race leave undecided is decided by the median of their ratios and by the fastest time of each:
the preferred one stays unless both show it to be slower by `CLOSE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfstep.timing import Race, Ratio

MARGIN = 0.01  # a smaller gain does not pay for less precise numbers, or for code that is compiled again
CLOSE = 0.03  # a larger gain does, if it is only likely
CLEAR = {1: 4.0, 2: 0.5, 3: 0.2, 4: 0.1}
"""Rounds -> how far all ratios must lie beyond the margin: one time may be disturbed by anything. With five rounds the
interval is the range of the ratios, and those of equal candidates lie on one side of 1 in one case of 16."""

FINAL = 2  # candidates that are left to race on; of more, each round drops one at least


class Elimination(Race):
    """A race with preferences, all of whose rounds are timed."""

    def __init__(self, measure: Callable[[str, int], float]) -> None:
        super().__init__(measure)
        self.names: list[str] = []  # the candidates that are left, in the order of preference
        self.rounds = self.turns = 0  # a turn is that of one candidate in one round

    def eliminate(self, names: Sequence[str], most: int) -> None:
        """Race a round or more until one, the preferred first, is left, or another would pass `most` turns in all."""
        self.names, least = [name for name in names if name not in self.dropped], self.rounds + 1
        while self.rounds < least or len(self.names) > 1:
            if self.rounds >= least and self.turns + len(self.names) > most:
                return
            self.turns += len(self.names)
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
        if (ratio := self.ratio(name, preferred)) is None:
            return None
        clear = 1.0 + CLEAR.get(ratio.rounds, 0.0)
        if ratio.high < (1.0 - MARGIN) / clear:
            return True
        return False if ratio.low > (1.0 - MARGIN) * clear else None

    def over(self, name: str, base: str, seen: tuple[str, ...] = ()) -> Ratio | None:
        """Return the ratio of two candidates' steps, by way of others if they shared no round; None: there is none."""
        if (direct := self.ratio(name, base)) is not None:
            return direct
        for other in (one for one in self.times if one not in {name, base, *seen}):
            one, rest = self.ratio(name, other), self.over(other, base, (*seen, name))
            if one is not None and rest is not None:
                return one.times(rest)
        return None

    def best(self) -> str:
        """Return the candidate that replaces all that are preferred to it; "" if none is left."""
        best = ""
        for name in self.names:
            if not best or self._replaces(name, best):
                best = name
        return best

    def _replaces(self, name: str, preferred: str) -> bool:
        faster, ratio = self.faster(name, preferred), self.ratio(name, preferred)
        if faster is not None or ratio is None:
            return bool(faster)
        fastest = min(self.times[name].values()) / min(self.times[preferred].values())
        return max(ratio.median, fastest) < 1.0 - CLOSE

    def _drop_slower(self) -> None:
        """Drop candidates that another one replaces, or that do not replace one that is preferred; see `FINAL`."""
        slower = set()
        for place, preferred in enumerate(self.names):
            for name in self.names[place + 1 :]:
                if (faster := self.faster(name, preferred)) is not None:
                    slower.add(preferred if faster else name)
        if not slower and len(self.names) > FINAL:
            slower = {max(reversed(self.names), key=self.typical)}
        if len(slower) < len(self.names):  # else ratios of different rounds contradict one another
            self.names = [name for name in self.names if name not in slower]
