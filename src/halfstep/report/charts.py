"""Charts: curves, areas, bars from zero, dots with their intervals, heat maps and points; and their pictures.

A picture is SVG that takes its colours (CSS variables, so that one picture serves light and dark) and its font from the
page around it. Pictures are as wide as a phone; where there is more room, a page puts several side by side.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from halfstep.formats import Format

__all__ = [
    "COLOURS", "AreaChart", "Bar", "BarChart", "Chart", "Dot", "DotChart", "HeatMap", "Key", "LineChart", "Point",
    "PointChart", "Series", "Strip", "draw", "limits_of",
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


# ------------------------------------------------------------------ pictures

# Sizes in px.
WIDTH = 350  # of a picture: a phone's screen without its margins
SIDE = 12  # left and right of bars and dots: room for half a number below the axis
PITCH = 38  # from one bar to the next: a line of text above the bar
FOOT = 42  # below the axes: numbers and what they count
TRACK = 17  # of a bar with what lies behind it
STRIP = 15  # of a heat map's row for its cells
FONT = 12
LETTER = 6.3  # mean width of a letter of that font
LINE_LETTERS = 45  # that fit on a line above a bar

ZEROS_APART = 5  # binades between the zeros of a heat map and its first exponent
NEAR_END = 40  # exponents: limits of a format beyond it, as those of bf16 and fp32, are not shown
FARTHEST = 60  # exponents: numbers beyond it are drawn in the outermost binade
POWERS = 12  # powers of two that have room on an axis
OFF_SCALE = 3.0  # a bar this many times longer than the median bar is cut, so that the others can be told apart
WIDEST = 4.0  # margins that the axis of a dot chart shows on either side; what lies beyond becomes an arrow
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Drawing(NamedTuple):
    """What belongs between ``<svg>`` and ``</svg>``, and the size of its canvas in px."""

    width: int
    height: int
    body: str


def draw(chart: Chart) -> Drawing:
    """Return the picture of `chart`; equal charts give equal pictures."""
    axes = DRAWN_BY[type(chart)](chart)
    return Drawing(WIDTH, axes.height, "\n".join(axes.elements))


class _Axes:
    """Axes on a canvas: `x` and `y` turn data into px from the left and from the top; methods draw at px.

    `edges` are px left of the axes, right of them and above them; `x` and `y` the ends of the axes.
    """

    def __init__(
        self, height: int, edges: tuple[int, int, int], x: tuple[float, float], y: tuple[float, float], x_label: str
    ) -> None:
        left, right, top = edges
        self.height, self.elements = height, list[str]()
        self.left, self.right, self.top, self.bottom = left, WIDTH - right, top, height - FOOT
        self._x, self._y = x, y
        self.line([(self.left, self.bottom), (self.right, self.bottom)], "faint", 0.8)
        self.write((self.left + self.right) / 2, height - 8, x_label, "muted", "middle")

    def x(self, value: float) -> float:
        low, high = self._x
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self._y
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def add(self, tag: str, style: str, text: str = "", **attributes: float | str) -> None:
        numbers = {k: v if isinstance(v, str) else _px(v) for k, v in attributes.items()}
        written = "".join(f' {name}="{value}"' for name, value in numbers.items())
        self.elements.append(f'<{tag}{written} style="{style}">{html.escape(_printable(text))}</{tag}>')

    def box(self, left: float, top: float, right: float, bottom: float, colour: str, strength: float = 1.0) -> None:
        style = f"fill: var(--{colour}){'' if strength == 1.0 else f'; opacity: {strength:g}'}"
        self.add("rect", style, x=left, y=top, width=right - left, height=bottom - top)

    def line(
        self, points: Iterable[tuple[float, float]], colour: str, width: float, dashes: str = "", strength: float = 1.0
    ) -> None:
        """Draw a line through points; one that is not finite is a gap."""
        parts = [list(part) for known, part in itertools.groupby(points, lambda p: all(map(math.isfinite, p))) if known]
        path = " ".join(f"M {' L '.join(f'{_px(x)} {_px(y)}' for x, y in part)}" for part in parts)
        style = f"fill: none; stroke: var(--{colour}); stroke-width: {width:g}"
        style += f"; stroke-dasharray: {dashes}" if dashes else ""
        self.add("path", style + (f"; opacity: {strength:g}" if strength != 1.0 else ""), d=path)

    def write(self, x: float, y: float, text: str, colour: str = "ink", anchor: str = "start") -> None:
        if text:
            place = "" if anchor == "start" else f"; text-anchor: {anchor}"
            self.add("text", f"font-size: {FONT}px; fill: var(--{colour}){place}", text, x=x, y=y)

    def mark(self, x: float, y: float, shape: str, colour: str, size: float, face: str = "") -> None:
        """Draw a sign: a "dot" filled with `face`, a "cross", or an arrow to "<" or ">"."""
        half = size / 2
        if shape == "dot":
            style = f"fill: {f'var(--{face})' if face else 'none'}; stroke: var(--{colour}); stroke-width: 1.6"
            self.add("circle", style, cx=x, cy=y, r=half)
        elif shape == "cross":
            for way in (-1, 1):
                self.line([(x - half, y - way * half), (x + half, y + way * half)], colour, 2.2)
        else:
            tip = half if shape == ">" else -half
            path = f"M {_px(x + tip)} {_px(y)} L {_px(x - tip)} {_px(y - half)} L {_px(x - tip)} {_px(y + half)} Z"
            self.add("path", f"fill: var(--{colour})", d=path)

    def x_ticks(self, ticks: Iterable[float], names: Sequence[str] = ()) -> None:
        for place, tick in enumerate(ticks):
            name = names[place] if names else _plain(tick)
            self.write(self.x(tick), self.bottom + 16, name, "muted", "middle")

    def y_ticks(self, ticks: Sequence[float], names: Sequence[str], *, grid: bool = True) -> None:
        for tick, name in zip(ticks, names, strict=True):
            y = self.y(tick)
            if grid:
                self.line([(self.left, y), (self.right, y)], "faint", 0.7)
            self.write(self.left - 6, y + 4, name, "muted", "end")

    def across(self, y: float, colour: str, width: float, dashes: str = "") -> None:
        self.line([(self.left, self.y(y)), (self.right, self.y(y))], colour, width, dashes)

    def upright(self, x: float, y: float, colour: str, width: float, dashes: str = "", size: float = TRACK) -> None:
        self.line([(x, y - size / 2), (x, y + size / 2)], colour, width, dashes)


def _colour(key: Key) -> str:
    return f"hue{key.hue}" if key.hue else "ink"


def _px(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _printable(text: str) -> str:
    """Return `text` on one line, without control characters, which XML forbids."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _plain(number: float, form: str = ".6g") -> str:
    """Return a number as a tick label; large ones without an exponent."""
    text = f"{number:,.0f}" if abs(number) >= 10_000 else f"{number:{form}}"
    return text.replace("-", "\N{MINUS SIGN}")


def _ends(values: Iterable[float], room: float) -> tuple[float, float]:
    """Return the ends of an axis: those of the finite values, and this share of their range as room."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    more = room * (high - low) if high > low else room * abs(high) or 0.5
    return low - more, high + more


def _ticks(ends: tuple[float, float], most: int, *, whole: bool = False) -> list[float]:
    """Return round numbers between two ends, whole ones if so wanted: `most` intervals at most."""
    raw = max((ends[1] - ends[0]) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    digits = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(power * digit for digit in digits if power * digit >= 0.999 * raw)
    return [n * step for n in range(math.ceil(ends[0] / step - 1e-9), math.floor(ends[1] / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two positive numbers, with 2 and 5 times them where there is room."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits, apart = ((1, 2, 5), 1) if last - first <= 2 else ((1,), math.ceil((last - first) / 7))
    found = (digit * 10.0**power for power in range(first, last + 1, apart) for digit in digits)
    return [tick for tick in found if low * 0.999 <= tick <= high * 1.001]


def _lines(chart: LineChart) -> _Axes:
    finite = [y for s in chart.series for y in s.y if math.isfinite(y)]
    log = chart.log and bool(finite) and min(finite) > 0

    def height(y: float) -> float:
        return math.log10(y) if log and math.isfinite(y) else y

    ends = _ends([*map(height, finite), *([0.0] if chart.zero_line else [])], 0.05)
    across = _ends((x for s in chart.series for x in s.x), 0.01)
    axes = _Axes(250, (58, 10, 24), across, ends, chart.x_label)
    axes.x_ticks(_ticks(across, 5, whole=True))
    most = max(map(abs, finite), default=0.0)
    power = math.floor(math.log10(most)) if most and not (log or 0.01 <= most < 10_000) else 0
    if power:
        axes.write(8, 15, f"\N{MULTIPLICATION SIGN} 10{str(power).translate(SUPERSCRIPTS)}", "muted")
    if finite:
        ticks = _log_ticks(10 ** ends[0], 10 ** ends[1]) if log else _ticks(ends, 5)
        axes.y_ticks([height(tick) for tick in ticks], [_plain(tick / 10**power) for tick in ticks])
    else:
        axes.write((axes.left + axes.right) / 2, 120, "no finite value", "muted", "middle")
    if chart.zero_line:
        axes.across(0.0, "muted", 1.0)
    for series in chart.series:
        points = [(axes.x(x), axes.y(height(y))) for x, y in zip(series.x, series.y, strict=True)]
        colour = _colour(series.key)
        if not series.key.hue:  # the reference lies below the others: wide and pale, it shows on both sides of them
            axes.line(points, colour, 4.5, strength=0.35)
        else:
            axes.line(points, colour, 1.5, "6 3" if series.key.light else "")
        if len(points) == 1 and math.isfinite(series.y[0]):
            axes.mark(*points[0], "dot", colour, 4, colour)
        for x in series.marks:
            known = [(abs(a - x), b) for a, b in zip(series.x, series.y, strict=True) if math.isfinite(b)]
            if known:  # the cross lies on the curve's nearest finite point
                axes.mark(axes.x(x), axes.y(height(min(known)[1])), "cross", colour, 7)
    return axes


def _areas(chart: AreaChart) -> _Axes:
    xs = chart.series[0].x if chart.series else ()
    sums = [0.0] * len(xs)
    tops = [sums := [low + y for low, y in zip(sums, series.y, strict=True)] for series in chart.series]
    high = 1.04 * max([*sums, chart.line or 0.0], default=1.0) or 1.0
    axes = _Axes(250, (58, 10, 24), _ends(xs, 0.0), (0.0, high), chart.x_label)
    axes.x_ticks(_ticks(_ends(xs, 0.0), 5, whole=True))
    ticks = _ticks((0.0, high), 5)
    axes.y_ticks(ticks, list(map(_plain, ticks)))
    floors = [[0.0] * len(xs), *tops]
    for series, low, top in zip(chart.series, floors, tops, strict=False):
        edge = [*_stairs(xs, top), *reversed(_stairs(xs, low))]
        path = " L ".join(f"{_px(axes.x(x))} {_px(axes.y(y))}" for x, y in edge)
        opacity = "; opacity: 0.45" if series.key.light else ""
        axes.add("path", f"fill: var(--{_colour(series.key)}){opacity}", d=f"M {path} Z")
    if chart.line is not None:
        axes.across(chart.line, "ink", 1.2, "5 2.5")
    return axes


def _stairs(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a curve that keeps each height until the next x."""
    points = list(zip(xs, ys, strict=True))
    return [corner for (x, y), (after, _) in itertools.pairwise(points) for corner in ((x, y), (after, y))] or points


# ------------------------------------------------------------------ bars, dots and strips below each other


def _rows(rows: Sequence[Bar | Strip], x: tuple[float, float], x_label: str) -> _Axes:
    """Return axes with the words of each row written above the place of its bar, dot or cells."""
    axes = _Axes(PITCH * max(len(rows), 1) + FOOT + 4, (SIDE, SIDE, 4), x, (1.0, 0.0), x_label)
    for place, row in enumerate(rows):
        y = PITCH * place + 19
        axes.write(axes.left, y, _shortened(row.label, max(8, LINE_LETTERS - len(row.text))))
        axes.write(axes.right, y, row.text, "muted", "end")
    return axes


def _middle(place: int) -> float:  # of a row, in px from the top
    return PITCH * place + 32.0


def _shortened(text: str, letters: int) -> str:
    """Return `text` with a gap in its middle if it is too long: names of modules differ at their end, as a rule."""
    text = _printable(text)
    if len(text) <= letters:
        return text
    head = (letters - 1) // 5
    return f"{text[:head]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - (letters - 1 - head) :]}"


def _bars(chart: BarChart) -> _Axes:
    end = _end([bar.value for bar in chart.bars if bar.value is not None and math.isfinite(bar.value)], chart.line)
    axes = _rows(chart.bars, (0.0, end), chart.x_label)
    axes.x_ticks(_ticks((0.0, end), 4))
    for place, bar in enumerate(chart.bars):
        y, colour = _middle(place), _colour(bar.key)
        if chart.band is not None:
            axes.box(axes.x(chart.band[0]), y - TRACK / 2, axes.x(min(chart.band[1], end)), y + TRACK / 2, "band")
        if bar.value is None or not math.isfinite(bar.value):
            continue
        shown = axes.x(min(bar.value, end))
        axes.box(axes.left, y - 5.5, shown, y + 5.5, colour, 0.55 if bar.key.light else 1.0)
        if bar.value > end:
            axes.mark(shown, y, ">", colour, 9)
        elif bar.low is not None and bar.high is not None:
            low, high = axes.x(bar.low), axes.x(min(bar.high, end))
            for paint, width in (("paper", 4.0), ("ink", 1.6)):  # an outline keeps it visible on any hue
                axes.line([(low, y), (high, y)], paint, width)
                for cap in (low, high):
                    axes.upright(cap, y, paint, width, size=7)
        if chart.line is not None:
            axes.upright(axes.x(chart.line), y, "ink", 1.2, "3 1.8")
    return axes


def _end(lengths: Sequence[float], line: float | None) -> float:
    """Return where the axis of a bar chart ends: at the longest bar, or before it if it is off all scale."""
    known = sorted([*lengths, *([] if line is None else [line])]) or [0.0]
    limit = OFF_SCALE * known[len(known) // 2]
    near = [length for length in known if length <= limit or limit <= 0.0]
    return max(near) * 1.04 if known[-1] > 0.0 else 1.0


def _dots(chart: DotChart) -> _Axes:
    ends = (d for dot in chart.dots for d in (dot.value, dot.low, dot.high) if d is not None and math.isfinite(d))
    limit = min(max([1.4 * chart.margin, *(1.05 * abs(end) for end in ends)]), WIDEST * chart.margin)
    axes = _rows(chart.dots, (-limit, limit), chart.x_label)
    ticks = (-chart.margin, 0.0, chart.margin)
    axes.x_ticks(ticks, [_plain(tick, "+.3g" if tick else "g") for tick in ticks])
    for place, dot in enumerate(chart.dots):
        y, colour = _middle(place), _colour(dot.key)
        axes.box(axes.x(-chart.margin), y - TRACK / 2, axes.x(chart.margin), y + TRACK / 2, "band")
        if dot.value is None or not math.isfinite(dot.value):
            continue
        axes.upright(axes.x(0.0), y, "muted", 1.0)
        if dot.low is not None and dot.high is not None and max(dot.low, -limit) < min(dot.high, limit):
            axes.line([(axes.x(max(dot.low, -limit)), y), (axes.x(min(dot.high, limit)), y)], colour, 2.4)
            for cap in (end for end in (dot.low, dot.high) if abs(end) <= limit):
                axes.upright(axes.x(cap), y, colour, 1.6, size=8)
        at = min(max(dot.value, -limit), limit)
        arrow = "" if at == dot.value else "<" if at < 0.0 else ">"
        shape = arrow or ("cross" if dot.mark == "cross" else "dot")
        axes.mark(axes.x(at), y, shape, colour, 8, "paper" if dot.mark == "hollow" else colour)
    return axes


def _heat(chart: HeatMap) -> _Axes:
    first, last = _exponents(chart)
    gone = first - ZEROS_APART  # where zeros are drawn
    axes = _rows(chart.strips, (gone - 0.6, last + 1.1), chart.x_label)
    room = (last - gone) / POWERS
    step = next(step for step in (8, 16, 32, 64) if step >= room)
    powers = [e for e in range(-256, 257, step) if first <= e <= last and e - gone >= room]
    axes.x_ticks([gone + 0.5, *powers], ["0", *(f"2{str(power).translate(SUPERSCRIPTS)}" for power in powers)])
    for place, strip in enumerate(chart.strips):
        top = _middle(place) - STRIP / 2

        def cells(left: float, right: float, colour: str, strength: float = 1.0, top: float = top) -> None:
            axes.box(axes.x(left), top, axes.x(right), top + STRIP, colour, strength)

        least, normal, most = (min(max(limit, first), last + 1) for limit in strip.limits)
        cells(least, most, "band", 0.5)
        cells(normal, most, "band")
        sums: dict[int, float] = {}  # what lies beyond the axis is in its outermost binades
        for exponent, share in strip.cells:
            inside = min(max(exponent, first), last)
            sums[inside] = sums.get(inside, 0.0) + share
        for exponent, share in sorted(sums.items()):
            if share > 0.0:
                full = strip.limits[1] <= exponent <= strip.limits[2]
                cells(exponent, exponent + 1, "hue1" if full else "hue2", _strength(share / max(sums.values())))
        if strip.zeros > 0.0:
            cells(gone, gone + 1, "muted", _strength(strip.zeros))
        for limit in strip.limits:
            if first <= limit <= last + 1:
                axes.upright(axes.x(limit), _middle(place), "ink", 1.2, size=STRIP + 4)
    return axes


def _strength(share: float) -> float:  # of a colour; roots keep small shares in sight
    return round(0.12 + 0.88 * math.sqrt(share), 2)


def _exponents(chart: HeatMap) -> tuple[int, int]:
    """Return the first and the last binade of the axis: where the numbers are, with their formats' ends if near."""
    found = [e for strip in chart.strips for e, share in strip.cells if share > 0.0] or [0]
    ends = [limit for strip in chart.strips for limit in strip.limits if abs(limit) <= NEAR_END]
    first = min([max(min(found), -FARTHEST), *(math.floor(end) for end in ends)])
    last = max([min(max(found), FARTHEST), *(math.ceil(end) for end in ends)])
    return first, max(last, first + 8)


def _points(chart: PointChart) -> _Axes:
    """Draw points; y in limits up to the limit, beyond it one more unit for each power of ten."""

    def height(y: float) -> float:
        return y / chart.limit if abs(y) <= chart.limit else math.copysign(1 + math.log10(abs(y) / chart.limit), y)

    finite = [height(p.y) for p in chart.points if math.isfinite(p.y)]
    low, high = min([-1.0, *finite]), max([1.6, *finite])
    lost = len(finite) < len(chart.points)
    top = high + (0.16 * (high - low) if lost else 0.0)  # where points that are not finite are drawn
    ends = _ends((p.x for p in chart.points), 0.06)
    axes = _Axes(330, (66, 16, 32), ends, (low - 0.1, top + 0.1), chart.x_label)
    axes.box(axes.left, axes.y(1.0), axes.right, axes.y(-1.0), "band")
    powers = [sign * 10.0**n for sign in (-1, 1) for n in range(math.ceil(max(abs(low), high)))]
    shown = {0.0: 0.0, **{height(n * chart.limit): n * chart.limit for n in powers}}
    ticks = [tick for tick in sorted(shown) if low <= tick <= high]
    names = [_plain(shown[tick], "+.3g" if shown[tick] else "g") for tick in ticks]
    axes.x_ticks(_ticks(ends, 5))
    axes.y_ticks([*ticks, top] if lost else ticks, [*names, "not finite"] if lost else names, grid=False)
    axes.across(1.0, "ink", 1.2, "5 2.5")
    axes.write(axes.right, axes.y(1.0) - 4, chart.limit_label, "muted", "end")
    axes.write(4, 15, chart.y_label, "muted")
    xs, ys = [x for x, _ in chart.front], [height(y) for _, y in chart.front]
    corners = [*_stairs(xs, ys), (xs[-1], ys[-1])] if chart.front else []
    axes.line([(axes.x(x), axes.y(y)) for x, y in corners], "muted", 1.2, strength=0.7)
    places = [(p, axes.x(p.x), axes.y(height(p.y) if math.isfinite(p.y) else top)) for p in chart.points]
    for point, x, y in places:
        colour = _colour(point.key)
        if point.mark == "chosen":
            axes.mark(x, y, "dot", colour, 15)
        shape = "cross" if point.mark == "cross" else "dot"
        axes.mark(x, y, shape, colour, 7.5, "paper" if point.mark == "hollow" else colour)
    taken = [(x - 5, y - 5, x + 5, y + 5) for _, x, y in places]
    taken += [(0.0, axes.y(tick) - 7, 64.0, axes.y(tick) + 7) for tick in ticks]
    for point, x, y in reversed(places):
        if point.named:
            _write_beside(axes, _shortened(point.label, 30), x, y, taken)
    return axes


def _write_beside(axes: _Axes, text: str, x: float, y: float, taken: list[tuple[float, float, float, float]]) -> None:
    """Write `text` at the first free place beside the point (x, y); where all are taken, nowhere."""
    wide, tall = LETTER * len(text), FONT + 1.0
    right, left = x + 10, x - 10 - wide
    inside = min(max(x - wide / 2, 68.0), WIDTH - wide - 2)
    spots = [(side, y + up) for up in (-9, -21, 5) for side in (right, left)]
    spots += [(inside, y - tall + way * n) for n in (12, 26, 40, 54, 68, 82) for way in (-1, 1)]
    for a, b in spots:
        fits = a >= 0 and a + wide <= WIDTH and b >= 18 and b + tall <= axes.bottom
        if fits and not any(a < x1 and x0 < a + wide and b < y1 and y0 < b + tall for x0, y0, x1, y1 in taken):
            axes.write(a, b + FONT - 1, text)
            taken.append((a, b, a + wide, b + tall))
            return


DRAWN_BY: Mapping[type, Callable[[Any], _Axes]] = {
    LineChart: _lines,
    AreaChart: _areas,
    BarChart: _bars,
    DotChart: _dots,
    HeatMap: _heat,
    PointChart: _points,
}
