"""Charts: what a picture shows, as data: curves, bars from zero, and dots with their intervals."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COLOURS", "Bar", "BarChart", "Chart", "Dot", "DotChart", "HeatMap", "Key", "LineChart", "Series", "Strip"]

COLOURS = 6  # hues that stay apart for colour-blind readers; colour 0 is the text's own, for the reference


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """How something looks, the same in every picture of a document.

    Attributes:
        colour: 0 is the colour of text; 1 to `COLOURS` are hues; higher numbers start again at 1.
        light: the second of two that share a colour: a dashed line, a paler bar.
    """

    colour: int = 0
    light: bool = False

    @property
    def hue(self) -> int:
        """Return the colour as a number from 0 to `COLOURS`."""
        return self.colour if self.colour == 0 else (self.colour - 1) % COLOURS + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve.

    Attributes:
        label: its name.
        x: where its points lie, rising.
        y: their heights; a value that is not finite is a gap.
        marks: places on the x axis where the curve is marked with a cross.
        key: how it looks.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: tuple[float, ...] = ()
    key: Key = Key()


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """Curves over a common axis. With ``log`` the y axis is logarithmic if all values are positive."""

    x_label: str
    series: tuple[Series, ...]
    log: bool = False
    zero_line: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar from zero: its label and what is written beside it, its length, and the interval of that length.

    A value of None draws no bar; `text` then says why.
    """

    label: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    key: Key = Key()


@dataclass(frozen=True, kw_only=True, slots=True)
class BarChart:
    """Bars below each other.

    Attributes:
        x_label: what the length means, with its unit.
        bars: from top to bottom.
        line: a value to compare with, drawn across all bars.
        band: an interval around it that counts as equal.
    """

    x_label: str
    bars: tuple[Bar, ...]
    line: float | None = None
    band: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One estimate: where it lies, its interval, and how sure it is.

    Attributes:
        label: what was estimated.
        text: what is written beside it.
        value: the estimate; None draws no dot; `text` then says why.
        low: lower end of the interval.
        high: upper end.
        mark: "full" (decided, inside the band), "hollow" (undecided) or "cross" (decided, outside it).
        key: how it looks.
    """

    label: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    mark: str = "full"
    key: Key = Key()


@dataclass(frozen=True, kw_only=True, slots=True)
class DotChart:
    """Estimates below each other against zero and a margin around it: ``-margin`` to ``margin`` counts as none."""

    x_label: str
    dots: tuple[Dot, ...]
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """One row of a heat map: how many of its numbers lie in each binade.

    Attributes:
        label: what it is of.
        text: what is written beside it.
        cells: (exponent, share of all numbers), rising; shares from 0 to 1.
        zeros: share of zeros, drawn apart at the left end.
        limits: exponents of the smallest number, the smallest with full precision and the largest of its format.
    """

    label: str
    text: str
    cells: tuple[tuple[int, float], ...]
    zeros: float
    limits: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Strips below each other over a common axis of exponents; the range of each one's format lies behind it."""

    x_label: str
    strips: tuple[Strip, ...]


Chart = LineChart | BarChart | DotChart | HeatMap
