"""Charts: what a picture shows, as data: curves, areas, bars from zero, and dots with their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfstep.formats import Format

__all__ = [
    "COLOURS", "AreaChart", "Bar", "BarChart", "Chart", "Dot", "DotChart", "HeatMap", "Key", "LineChart", "Point",
    "PointChart", "Series", "Strip", "limits_of",
]  # fmt: skip

COLOURS = 6  # hues that stay apart for colour-blind readers; colour 0 is the text's own, for the reference


@dataclass(frozen=True, slots=True)
class Key:
    """How something looks, the same in every picture of a document."""

    colour: int = 0  # 0 is the colour of text; 1 to `COLOURS` are hues; higher numbers start again at 1
    light: bool = False  # the second of two that share a colour: a dashed line, a paler bar

    @property
    def hue(self) -> int:
        """Return the colour as a number from 0 to `COLOURS`."""
        return self.colour if self.colour == 0 else (self.colour - 1) % COLOURS + 1


@dataclass(frozen=True, slots=True)
class Series:
    """One curve."""

    label: str  # its name
    x: tuple[float, ...]  # where its points lie, rising
    y: tuple[float, ...]  # their heights; a value that is not finite is a gap
    marks: tuple[float, ...] = ()  # places on the x axis where the curve is marked with a cross
    key: Key = Key()  # how it looks


@dataclass(frozen=True, slots=True)
class LineChart:
    """Curves over a common axis. With ``log`` the y axis is logarithmic if all values are positive."""

    x_label: str
    series: tuple[Series, ...]
    log: bool = False
    zero_line: bool = False


@dataclass(frozen=True, slots=True)
class AreaChart:
    """Amounts on top of each other over a common axis: all series have the same `x`; the first lies at the bottom."""

    x_label: str
    series: tuple[Series, ...]
    line: float | None = None  # a height to compare the sum with


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar from zero: its label and what is written beside it, its length, and the interval of that length.

    A value of None draws none; `text` then has the reason.
    """

    label: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    key: Key = Key()


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars below each other."""

    x_label: str  # what the length means, with its unit
    bars: tuple[Bar, ...]  # from top to bottom
    line: float | None = None  # a value to compare with, drawn across all bars
    band: tuple[float, float] | None = None  # an interval around it that counts as equal


@dataclass(frozen=True, slots=True)
class Dot(Bar):
    """One estimate: where it lies, its interval, and how sure it is."""

    mark: str = "full"  # "full" (decided, inside the band), "hollow" (undecided) or "cross" (decided, outside it)


@dataclass(frozen=True, slots=True)
class DotChart:
    """Estimates below each other against zero and a margin around it: ``-margin`` to ``margin`` counts as none."""

    x_label: str
    dots: tuple[Dot, ...]
    margin: float


@dataclass(frozen=True, slots=True)
class Strip:
    """One row of a heat map: how many of its numbers lie in each binade."""

    label: str  # what it is of
    text: str  # what is written beside it
    cells: tuple[tuple[int, float], ...]  # (exponent, share of all numbers), rising; shares from 0 to 1
    zeros: float  # share of zeros, drawn apart at the left end
    # exponents of the smallest number, the smallest with full precision and the largest of its format
    limits: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Strips below each other over a common axis of exponents; the range of each one's format lies behind it."""

    x_label: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a plane."""

    label: str  # its name; written beside it if `named`
    x: float
    y: float  # inf is drawn above the axis, as "not finite"
    named: bool = False
    mark: str = "full"  # "full", "hollow", "cross" or "chosen" (larger, with a ring)
    key: Key = Key()


@dataclass(frozen=True, slots=True)
class PointChart:
    """Points of a plane, with a limit for y: linear up to the limit, logarithmic beyond it."""

    x_label: str
    y_label: str
    points: tuple[Point, ...]  # later ones lie above, and are named first where names have no room
    limit: float  # positive; what lies from -limit to limit is shaded, and there is a line at the limit
    limit_label: str
    front: tuple[tuple[float, float], ...] = ()  # joined by a line of steps, rising in x


Chart = LineChart | AreaChart | BarChart | DotChart | HeatMap | PointChart


def limits_of(form: Format) -> tuple[float, float, float]:
    """Return the limits of a strip of numbers in `form`."""
    return math.log2(form.smallest_subnormal), math.log2(form.smallest_normal), math.log2(form.max)
