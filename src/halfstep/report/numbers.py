"""Numbers for readers: a fixed count of decimals in a column, bytes in one unit, a real minus sign."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Decimals:
    """Numbers with as many digits behind the point as can matter."""

    count: int

    @classmethod
    def of(cls, largest: float) -> Decimals:
        """Return the digits that show a hundredth of `largest`: a margin, or the largest of a column."""
        return cls(max(0, 2 - math.floor(math.log10(largest))))

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


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes in a unit that suits all of some counts, with three digits of the largest."""

    unit: str
    bytes: int
    decimals: int

    @classmethod
    def of(cls, counts: Iterable[int]) -> Size:
        """Return the unit for `counts`."""
        most = max(counts)
        unit, size = next(((name, size) for name, size in reversed(UNITS) if most >= size), UNITS[0])
        return cls(unit, size, 0 if size == 1 else max(0, 2 - math.floor(math.log10(most / size))))

    def __call__(self, count: int) -> str:
        """Return the count in this unit, without the unit."""
        return f"{count / self.bytes:.{self.decimals}f}"
