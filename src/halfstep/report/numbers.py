"""Numbers for readers: a fixed count of decimals in a column, bytes in one unit, a real minus sign."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["Decimals", "Size", "counted", "listed", "minus"]

UNITS = (("B", 1), ("kB", 1_000), ("MB", 1_000_000), ("GB", 1_000_000_000))


def minus(text: str) -> str:
    """Return `text` with hyphens as minus signs; for numbers, not for words."""
    return text.replace("-", "\N{MINUS SIGN}")


def counted(count: int, what: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


class Decimals:
    """Numbers with the digits behind the point that show a hundredth of `largest`: a margin, or of a column."""

    def __init__(self, largest: float) -> None:
        self.count = max(0, 2 - math.floor(math.log10(largest)))

    def __call__(self, number: float) -> str:
        """Return the number, in words if it is none."""
        if not math.isfinite(number):
            return "not finite"
        return minus(f"{self._nearest(number):.{self.count}f}")

    def signed(self, number: float) -> str:
        """Return the number with its sign; a zero has none."""
        nearest = self._nearest(number)
        return minus(f"{nearest:+.{self.count}f}" if nearest else f"{nearest:.{self.count}f}")

    def _nearest(self, number: float) -> float:
        return round(number, self.count) + 0.0  # adding makes -0.0 a plain zero


class Size:
    """Bytes in a unit that suits all of some counts, with three digits of the largest."""

    def __init__(self, counts: Iterable[int]) -> None:
        most = max(counts)
        self.unit, self.bytes = next((pair for pair in reversed(UNITS) if most >= pair[1]), UNITS[0])
        self._decimals = Decimals(most / self.bytes if self.bytes > 1 else 100.0)

    def __call__(self, count: int) -> str:
        """Return the count in this unit, without the unit."""
        return self._decimals(count / self.bytes)
