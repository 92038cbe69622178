"""Charts: curves, areas, bars from zero, dots with their intervals, heat maps and points; and their pictures.

A picture is SVG that takes its colours (CSS variables, so that one picture serves light and dark) and its font from the
page around it. Pictures are as wide as a phone; where there is more room, a page puts several side by side.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
class Dot(Bar):
    """One estimate: where it lies, its interval, and how sure it is."""

    mark: str = "full"  # "full" (decided, inside the band), "hollow" (undecided) or "cross" (decided, outside it)


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
class Point:
    """One point of a plane."""

    label: str  # its name; written beside it if `named`
    x: float
    y: float  # inf is drawn above the axis, as "not finite"
    named: bool = False
    mark: str = "full"  # "full", "hollow", "cross" or "chosen" (larger, with a ring)
    key: Key = Key()


@dataclass(frozen=True, slots=True)
class Chart:
    """The content of a picture."""

    x_label: str  # below its axis

    def _drawn(self) -> _Drawing:
        raise NotImplementedError


def draw(chart: Chart) -> _Drawing:
    """Return the picture of `chart`; equal charts give equal pictures."""
    return chart._drawn()


def limits_of(form: Format) -> tuple[float, float, float]:
    """Return the limits of a strip of numbers in `form`."""
    return math.log2(form.smallest_subnormal), math.log2(form.smallest_normal), math.log2(form.max)


# ------------------------------------------------------------------ pictures

Corners = tuple[float, float, float, float]  # of a box: left, top, right, bottom

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


class _Drawing:
    """A picture: what belongs between ``<svg>`` and ``</svg>`` (`body`), and the size of its canvas in px.

    `x` and `y` turn data into px from the left and from the top; methods draw at px.

    `edges` are px left of the axes, right of them and above them; `x` and `y` the ends of the axes.
    """

    width = WIDTH

    def __init__(
        self, height: int, edges: tuple[int, int, int], x: tuple[float, float], y: tuple[float, float], x_label: str
    ) -> None:
        left, right, top = edges
        self.height, self.elements = height, list[str]()
        self.left, self.right, self.top, self.bottom = left, WIDTH - right, top, height - FOOT
        self._x, self._y = x, y
        self.line([(self.left, self.bottom), (self.right, self.bottom)], "faint", 0.8)
        self.write((self.left + self.right) / 2, height - 8, x_label, "muted", "middle")

    @property
    def body(self) -> str:
        return "\n".join(self.elements)

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

    def x_ticks(self, ticks: Sequence[float], names: Sequence[str] = ()) -> None:
        for tick, name in zip(ticks, names or map(_plain, ticks), strict=True):
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


def _stairs(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a curve that keeps each height until the next x."""
    points = list(zip(xs, ys, strict=True))
    return [corner for (x, y), (after, _) in itertools.pairwise(points) for corner in ((x, y), (after, y))] or points


# ------------------------------------------------------------------ bars, dots and strips below each other


def _rows(rows: Sequence[Bar | Strip], x: tuple[float, float], x_label: str) -> _Drawing:
    """Return axes with the words of each row written above the place of its bar, dot or cells."""
    axes = _Drawing(PITCH * max(len(rows), 1) + FOOT + 4, (SIDE, SIDE, 4), x, (1.0, 0.0), x_label)
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


def _strength(share: float) -> float:  # of a colour; roots keep small shares in sight
    return round(0.12 + 0.88 * math.sqrt(share), 2)


def _write_beside(axes: _Drawing, text: str, x: float, y: float, taken: list[Corners]) -> None:
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


@dataclass(frozen=True, slots=True)
class LineChart(Chart):
    """Curves over a common axis. With ``log`` the y axis is logarithmic if all values are positive."""

    series: tuple[Series, ...]
    log: bool = False
    zero_line: bool = False

    def _drawn(self) -> _Drawing:
        finite = [y for s in self.series for y in s.y if math.isfinite(y)]
        log = self.log and bool(finite) and min(finite) > 0

        def height(y: float) -> float:
            return math.log10(y) if log and math.isfinite(y) else y

        ends = _ends([*map(height, finite), *([0.0] if self.zero_line else [])], 0.05)
        across = _ends((x for s in self.series for x in s.x), 0.01)
        axes = _Drawing(250, (58, 10, 24), across, ends, self.x_label)
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
        if self.zero_line:
            axes.across(0.0, "muted", 1.0)
        for series in self.series:
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


@dataclass(frozen=True, slots=True)
class AreaChart(Chart):
    """Amounts on top of each other over a common axis: all series have the same `x`; the first lies at the bottom."""

    series: tuple[Series, ...]
    line: float | None = None  # a height to compare the sum with

    def _drawn(self) -> _Drawing:
        xs = self.series[0].x if self.series else ()
        sums = [0.0] * len(xs)
        tops = [sums := [low + y for low, y in zip(sums, series.y, strict=True)] for series in self.series]
        high = 1.04 * max([*sums, self.line or 0.0], default=1.0) or 1.0
        axes = _Drawing(250, (58, 10, 24), _ends(xs, 0.0), (0.0, high), self.x_label)
        axes.x_ticks(_ticks(_ends(xs, 0.0), 5, whole=True))
        ticks = _ticks((0.0, high), 5)
        axes.y_ticks(ticks, list(map(_plain, ticks)))
        floors = [[0.0] * len(xs), *tops]
        for series, low, top in zip(self.series, floors, tops, strict=False):
            edge = [*_stairs(xs, top), *reversed(_stairs(xs, low))]
            path = " L ".join(f"{_px(axes.x(x))} {_px(axes.y(y))}" for x, y in edge)
            opacity = "; opacity: 0.45" if series.key.light else ""
            axes.add("path", f"fill: var(--{_colour(series.key)}){opacity}", d=f"M {path} Z")
        if self.line is not None:
            axes.across(self.line, "ink", 1.2, "5 2.5")
        return axes


@dataclass(frozen=True, slots=True)
class BarChart(Chart):
    """Bars below each other; `x_label` is what their length means, with its unit."""

    bars: tuple[Bar, ...]  # from top to bottom
    line: float | None = None  # a value to compare with, drawn across all bars
    band: tuple[float, float] | None = None  # an interval around it that counts as equal

    def _drawn(self) -> _Drawing:
        lengths = [length for length in (self.line, *(bar.value for bar in self.bars)) if length is not None]
        known = sorted(filter(math.isfinite, lengths)) or [0.0]
        limit = OFF_SCALE * known[len(known) // 2]
        near = [length for length in known if length <= limit or limit <= 0.0]  # what is off all scale is cut
        end = max(near) * 1.04 if known[-1] > 0.0 else 1.0
        axes = _rows(self.bars, (0.0, end), self.x_label)
        axes.x_ticks(_ticks((0.0, end), 4))
        for place, bar in enumerate(self.bars):
            y, colour = _middle(place), _colour(bar.key)
            if self.band is not None:
                axes.box(axes.x(self.band[0]), y - TRACK / 2, axes.x(min(self.band[1], end)), y + TRACK / 2, "band")
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
            if self.line is not None:
                axes.upright(axes.x(self.line), y, "ink", 1.2, "3 1.8")
        return axes


@dataclass(frozen=True, slots=True)
class DotChart(Chart):
    """Estimates below each other against zero and a margin around it: ``-margin`` to ``margin`` counts as none."""

    dots: tuple[Dot, ...]
    margin: float

    def _drawn(self) -> _Drawing:
        ends = (d for dot in self.dots for d in (dot.value, dot.low, dot.high) if d is not None and math.isfinite(d))
        limit = min(max([1.4 * self.margin, *(1.05 * abs(end) for end in ends)]), WIDEST * self.margin)
        axes = _rows(self.dots, (-limit, limit), self.x_label)
        ticks = (-self.margin, 0.0, self.margin)
        axes.x_ticks(ticks, [_plain(tick, "+.3g" if tick else "g") for tick in ticks])
        for place, dot in enumerate(self.dots):
            y, colour = _middle(place), _colour(dot.key)
            axes.box(axes.x(-self.margin), y - TRACK / 2, axes.x(self.margin), y + TRACK / 2, "band")
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


@dataclass(frozen=True, slots=True)
class HeatMap(Chart):
    """Strips below each other over a common axis of exponents; the range of each one's format lies behind it."""

    strips: tuple[Strip, ...]

    def _drawn(self) -> _Drawing:
        # the axis has the binades where the numbers are, and their formats' ends if these are near
        found = [e for strip in self.strips for e, share in strip.cells if share > 0.0] or [0]
        ends = [limit for strip in self.strips for limit in strip.limits if abs(limit) <= NEAR_END]
        first = min([max(min(found), -FARTHEST), *(math.floor(end) for end in ends)])
        last = max([min(max(found), FARTHEST), *(math.ceil(end) for end in ends), first + 8])
        gone = first - ZEROS_APART  # where zeros are drawn
        axes = _rows(self.strips, (gone - 0.6, last + 1.1), self.x_label)
        room = (last - gone) / POWERS
        step = next(step for step in (8, 16, 32, 64) if step >= room)
        powers = [e for e in range(-256, 257, step) if first <= e <= last and e - gone >= room]
        axes.x_ticks([gone + 0.5, *powers], ["0", *(f"2{str(power).translate(SUPERSCRIPTS)}" for power in powers)])
        for place, strip in enumerate(self.strips):
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


@dataclass(frozen=True, slots=True)
class PointChart(Chart):
    """Points of a plane, with a limit for y: linear up to the limit, logarithmic beyond it."""

    y_label: str
    points: tuple[Point, ...]  # later ones lie above, and are named first where names have no room
    limit: float  # positive; what lies from -limit to limit is shaded, and there is a line at the limit
    limit_label: str
    front: tuple[tuple[float, float], ...] = ()  # joined by a line of steps, rising in x

    def _drawn(self) -> _Drawing:
        def height(y: float) -> float:
            return y / self.limit if abs(y) <= self.limit else math.copysign(1 + math.log10(abs(y) / self.limit), y)

        finite = [height(p.y) for p in self.points if math.isfinite(p.y)]
        low, high = min([-1.0, *finite]), max([1.6, *finite])
        lost = len(finite) < len(self.points)
        top = high + (0.16 * (high - low) if lost else 0.0)  # where points that are not finite are drawn
        ends = _ends((p.x for p in self.points), 0.06)
        axes = _Drawing(330, (66, 16, 32), ends, (low - 0.1, top + 0.1), self.x_label)
        axes.box(axes.left, axes.y(1.0), axes.right, axes.y(-1.0), "band")
        powers = [sign * 10.0**n for sign in (-1, 1) for n in range(math.ceil(max(abs(low), high)))]
        shown = {0.0: 0.0, **{height(n * self.limit): n * self.limit for n in powers}}
        ticks = [tick for tick in sorted(shown) if low <= tick <= high]
        names = [_plain(shown[tick], "+.3g" if shown[tick] else "g") for tick in ticks]
        axes.x_ticks(_ticks(ends, 5))
        axes.y_ticks([*ticks, top] if lost else ticks, [*names, "not finite"] if lost else names, grid=False)
        axes.across(1.0, "ink", 1.2, "5 2.5")
        axes.write(axes.right, axes.y(1.0) - 4, self.limit_label, "muted", "end")
        axes.write(4, 15, self.y_label, "muted")
        xs, ys = [x for x, _ in self.front], [height(y) for _, y in self.front]
        corners = [*_stairs(xs, ys), (xs[-1], ys[-1])] if self.front else []
        axes.line([(axes.x(x), axes.y(y)) for x, y in corners], "muted", 1.2, strength=0.7)
        places = [(p, axes.x(p.x), axes.y(height(p.y) if math.isfinite(p.y) else top)) for p in self.points]
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
