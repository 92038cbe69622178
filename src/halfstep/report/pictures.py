"""Pictures: a chart drawn by matplotlib as SVG that takes its colours and its font from the page around it.

Everything is drawn in placeholder colours, which become CSS variables (`PAINT`): one picture serves light and dark.
Text stays text. Pictures are as wide as a phone; where there is more room, a page puts several side by side.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from halfstep.report.charts import (
    COLOURS,
    AreaChart,
    Bar,
    BarChart,
    Chart,
    Dot,
    DotChart,
    HeatMap,
    Key,
    LineChart,
    PointChart,
    Series,
    Strip,
)

__all__ = ["PAINT", "Drawing", "draw"]

WIDTH = 350  # px of a picture: a phone's screen without its margins
SIDE = 12  # px left and right of bars and dots: room for half a number below the axis
PITCH = 38  # px from one bar to the next: a line of text above the bar
FOOT = 42  # px below the axes: numbers and what they count
LINES_HEIGHT = 250
POINTS_HEIGHT = 330
TRACK = 17  # px of that for the bar and what lies behind it
FONT = 12  # px
STRIP = 15  # px of a heat map's row for its cells
TICKS = 12
"""Powers of two that have room on an axis."""

ZEROS_APART = 5  # binades between the zeros of a heat map and its first exponent
NEAR_END = 40  # exponents: limits of a format beyond it, as those of bf16 and fp32, are not shown
FARTHEST = 60  # exponents: numbers beyond it are drawn in the outermost binade
OFF_SCALE = 3.0  # a bar this many times longer than the median bar is cut, so that the others can be told apart
WIDEST = 4.0  # margins that the axis of a dot chart shows on either side; what lies beyond becomes an arrow

INK, MUTED, FAINT, BAND, PAPER = "#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005"
HUES = tuple(f"#0b000{hue}" for hue in range(1, COLOURS + 1))
PAINT: Mapping[str, str] = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    FAINT: "var(--faint)",
    BAND: "var(--band)",
    PAPER: "var(--paper)",
    **{placeholder: f"var(--hue{hue})" for hue, placeholder in enumerate(HUES, start=1)},
}
"""Placeholder colour -> CSS variable that takes its place."""

REFERENCE = re.compile(r"(?:^|\()#([^)]+)")  # to a name in the same file: "#name" or "url(#name)"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SETTINGS: Any = {
    "svg.fonttype": "none",  # text as text: it can be searched and copied, and has the page's font
    "svg.hashsalt": "halfstep",  # equal charts give equal files
    "text.parse_math": False,  # a dollar sign is a dollar sign
    "axes.unicode_minus": True,
    "font.size": FONT,
    "path.simplify": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """What belongs between ``<svg>`` and ``</svg>``, and the size of its canvas in px.

    References inside it begin with "@", to be replaced by something unique in the page.
    """

    width: int
    height: int
    body: str


def draw(chart: Chart) -> Drawing:
    """Return `chart` as a picture; equal charts give equal pictures."""
    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        # matplotlib only measures the text; the browser has the glyphs
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        if isinstance(chart, LineChart):
            return _drawn(LINES_HEIGHT, lambda figure: _lines(figure, chart))
        if isinstance(chart, AreaChart):
            return _drawn(LINES_HEIGHT, lambda figure: _areas(figure, chart))
        if isinstance(chart, BarChart):
            return _drawn(_height(len(chart.bars)), lambda figure: _bars(figure, chart))
        if isinstance(chart, PointChart):
            return _drawn(POINTS_HEIGHT, lambda figure: _points(figure, chart))
        if isinstance(chart, HeatMap):
            return _drawn(_height(len(chart.strips)), lambda figure: _heat(figure, chart))
        return _drawn(_height(len(chart.dots)), lambda figure: _dots(figure, chart))


def _drawn(height: int, paint: Callable[[Figure], None]) -> Drawing:
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)  # SVG has 72 dots to the inch: a point is a px
    figure.patch.set_visible(False)
    paint(figure)
    file = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)  # print_svg has no types
    canvas.print_svg(file, metadata={"Date": None})
    return Drawing(width=WIDTH, height=height, body=_inside(file.getvalue()))


def _axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Return axes with these distances in px from the edges of the picture."""
    width, height = figure.get_size_inches() * 72
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )
    axes.patch.set_visible(False)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=MUTED, labelsize=FONT, length=0, pad=6)
    axes.xaxis.label.set_color(MUTED)
    return axes


def _colour(key: Key) -> str:
    return HUES[key.hue - 1] if key.hue else INK


# ------------------------------------------------------------------ curves


def _lines(figure: Figure, chart: LineChart) -> None:
    axes = _axes(figure, left=58, right=10, top=24, bottom=FOOT)
    finite = [y for s in chart.series for y in s.y if math.isfinite(y)]
    if chart.log and finite and min(finite) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    power = _power(finite) if axes.get_yscale() == "linear" else 0
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _plain(y / 10**power)))
    if power:
        factor = f"\N{MULTIPLICATION SIGN} 10{str(power).translate(SUPERSCRIPTS)}"
        axes.annotate(factor, (0, 1), (-50, 9), "axes fraction", "offset points", color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    if chart.zero_line:
        axes.axhline(0.0, color=MUTED, linewidth=1.0)
    for series in chart.series:
        look: dict[str, Any] = {"dashes": (4, 2)} if series.key.light else {}
        lone: dict[str, Any] = {"marker": "o", "markersize": 4} if len(series.x) == 1 else {}
        if not series.key.hue:  # the reference lies below the others: wide and pale, it shows on both sides of them
            look = {"linewidth": 4.5, "alpha": 0.35}
        axes.plot(series.x, series.y, color=_colour(series.key), clip_on=False, **{"linewidth": 1.5, **look, **lone})
        at = [_height_at(series, x) for x in series.marks]
        axes.plot(series.marks, at, "x", color=_colour(series.key), markersize=7, markeredgewidth=1.8, clip_on=False)
    if not finite:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", color=MUTED, ha="center", transform=axes.transAxes)
    axes.margins(x=0.01)
    axes.set_xlabel(_printable(chart.x_label), fontsize=FONT)


def _areas(figure: Figure, chart: AreaChart) -> None:
    axes = _axes(figure, left=58, right=10, top=24, bottom=FOOT)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    below = [0.0] * len(chart.series[0].x if chart.series else ())
    for series in chart.series:
        above = [low + y for low, y in zip(below, series.y, strict=True)]
        strength = 0.45 if series.key.light else 1.0
        axes.fill_between(series.x, below, above, step="post", color=_colour(series.key), alpha=strength, linewidth=0)
        below = above
    if chart.line is not None:
        axes.axhline(chart.line, color=INK, linewidth=1.2, dashes=(4, 2))
    axes.set_ylim(0, 1.04 * max([*below, chart.line or 0.0], default=1.0) or 1.0)
    axes.margins(x=0.0)
    axes.set_xlabel(_printable(chart.x_label), fontsize=FONT)


def _power(values: Sequence[float]) -> int:
    """Return the power of ten to take out of the numbers on an axis, 0 if they are easy to read."""
    most = max((abs(value) for value in values), default=0.0)
    return math.floor(math.log10(most)) if most and not 0.01 <= most < 10_000 else 0


def _height_at(series: Series, x: float) -> float:
    """Return the height of the curve at `x`, between its finite points; nan if it has none."""
    known = [(a, b) for a, b in zip(series.x, series.y, strict=True) if math.isfinite(b)]
    before = [point for point in known if point[0] <= x]
    after = [point for point in known if point[0] > x]
    if not before or not after:
        return (before[-1:] or after[:1] or [(x, math.nan)])[0][1]
    (left, low), (right, high) = before[-1], after[0]
    return low + (high - low) * (x - left) / (right - left)


# ------------------------------------------------------------------ bars and dots


def _height(rows: int) -> int:
    return PITCH * max(rows, 1) + FOOT + 4


def _rows(figure: Figure, rows: Sequence[Bar | Dot | Strip], x_label: str) -> Axes:
    """Return axes, y in px from the top, with the words of each row written above the place of its bar or dot."""
    axes = _axes(figure, left=SIDE, right=SIDE, top=4, bottom=FOOT)
    axes.set_ylim(PITCH * max(len(rows), 1), 0)
    axes.yaxis.set_visible(False)
    axes.set_xlabel(_printable(x_label), fontsize=FONT)
    across = axes.get_yaxis_transform()  # x from 0 to 1 over the axes, y in px
    room = 45  # letters of a line
    for place, row in enumerate(rows):
        label = _shortened(row.label, max(8, room - len(row.text)))
        axes.text(0.0, PITCH * place + 15, label, color=INK, transform=across, fontsize=FONT)
        axes.text(
            1.0, PITCH * place + 15, _printable(row.text), color=MUTED, transform=across, ha="right", fontsize=FONT
        )
    return axes


def _printable(text: str) -> str:
    """Return `text` on one line, without control characters, which XML forbids."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _shortened(text: str, letters: int) -> str:
    """Return `text` with a gap in its middle if it is too long: names of modules differ at their end, as a rule."""
    text = _printable(text)
    if len(text) <= letters:
        return text
    head = (letters - 1) // 5
    return f"{text[:head]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - (letters - 1 - head) :]}"


def _middle(place: int) -> float:
    return PITCH * place + 28.0


def _tracks(axes: Axes, rows: int, band: tuple[float, float] | None) -> None:
    """Draw the band behind each bar or dot, not behind the words between them."""
    if band is None:
        return
    for place in range(rows):
        axes.broken_barh([(band[0], band[1] - band[0])], (_middle(place) - TRACK / 2, TRACK), color=BAND, linewidth=0)


def _bars(figure: Figure, chart: BarChart) -> None:
    axes = _rows(figure, chart.bars, chart.x_label)
    lengths = [bar.value for bar in chart.bars if bar.value is not None and math.isfinite(bar.value)]
    end = _end(lengths, chart.line)
    axes.set_xlim(0.0, end)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    _tracks(axes, len(chart.bars), chart.band)
    for place, bar in enumerate(chart.bars):
        if bar.value is None or not math.isfinite(bar.value):
            continue
        y, colour = _middle(place), _colour(bar.key)
        shown = min(bar.value, end)
        axes.barh(y, shown, height=11, color=colour, alpha=0.55 if bar.key.light else 1.0, linewidth=0)
        if bar.value > end:
            axes.plot([end], [y], ">", color=colour, markersize=9, clip_on=False)
        elif bar.low is not None and bar.high is not None:
            _whisker(axes, bar.low, min(bar.high, end), y)
        if chart.line is not None:
            axes.plot([chart.line] * 2, [y - TRACK / 2, y + TRACK / 2], color=INK, linewidth=1.2, dashes=(2.5, 1.5))


def _end(lengths: Sequence[float], line: float | None) -> float:
    """Return where the axis of a bar chart ends: at the longest bar, or before it if it is off all scale."""
    known = sorted([*lengths, *([] if line is None else [line])])
    if not known or known[-1] <= 0.0:
        return 1.0
    limit = OFF_SCALE * known[len(known) // 2]
    near = [length for length in known if length <= limit or limit <= 0.0]
    return max(near or known) * 1.04


def _whisker(axes: Axes, low: float, high: float, y: float) -> None:
    """Draw an interval on a bar: an outline in the colour of the page keeps it visible on any hue."""
    for colour, width in ((PAPER, 4.0), (INK, 1.6)):
        axes.plot([low, high], [y, y], color=colour, linewidth=width, solid_capstyle="butt", clip_on=False)
        axes.plot([low, high], [y, y], "|", color=colour, markersize=7, markeredgewidth=width, clip_on=False)


def _dots(figure: Figure, chart: DotChart) -> None:
    axes = _rows(figure, chart.dots, chart.x_label)
    ends = (d for dot in chart.dots for d in (dot.value, dot.low, dot.high) if d is not None and math.isfinite(d))
    limit = min(max([1.4 * chart.margin, *(1.05 * abs(end) for end in ends)]), WIDEST * chart.margin)
    axes.set_xlim(-limit, limit)
    _tracks(axes, len(chart.dots), (-chart.margin, chart.margin))
    axes.set_xticks([-chart.margin, 0.0, chart.margin])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _plain(x, form="+.3g" if x else "g")))
    for place, dot in enumerate(chart.dots):
        if dot.value is None or not math.isfinite(dot.value):
            continue
        y, colour = _middle(place), _colour(dot.key)
        axes.plot([0.0, 0.0], [y - TRACK / 2, y + TRACK / 2], color=MUTED, linewidth=1.0)
        if dot.low is not None and dot.high is not None and max(dot.low, -limit) < min(dot.high, limit):
            inside = [max(dot.low, -limit), min(dot.high, limit)]
            axes.plot(inside, [y, y], color=colour, linewidth=2.4, solid_capstyle="butt", clip_on=False)
            caps = [end for end in (dot.low, dot.high) if abs(end) <= limit]
            axes.plot(caps, [y] * len(caps), "|", color=colour, markersize=8, markeredgewidth=1.6, clip_on=False)
        mark = {"full": "o", "hollow": "o", "cross": "X"}[dot.mark]
        at = min(max(dot.value, -limit), limit)
        if at != dot.value:
            mark = "<" if at < 0.0 else ">"
        face = PAPER if dot.mark == "hollow" else colour
        axes.plot([at], [y], mark, color=colour, markerfacecolor=face, markersize=8, markeredgewidth=1.6, clip_on=False)


# ------------------------------------------------------------------ points


def _points(figure: Figure, chart: PointChart) -> None:
    """Draw points; y in limits up to the limit, beyond it one more unit for each power of ten."""
    axes = _axes(figure, left=66, right=16, top=32, bottom=FOOT)

    def height(y: float) -> float:
        return y / chart.limit if abs(y) <= chart.limit else math.copysign(1 + math.log10(abs(y) / chart.limit), y)

    finite = [height(p.y) for p in chart.points if math.isfinite(p.y)]
    lost = any(not math.isfinite(p.y) for p in chart.points)
    low, high = min([-1.0, *finite]), max([1.6, *finite])
    top = high + (0.16 * (high - low) if lost else 0.0)  # where points that are not finite are drawn
    axes.set_ylim(low - 0.1, top + 0.1)
    across = [p.x for p in chart.points]
    room = 0.06 * ((max(across) - min(across)) or abs(across[0]) or 1.0) if across else 1.0
    axes.set_xlim(min(across, default=0.0) - room, max(across, default=1.0) + room)
    powers = [sign * 10.0**n for sign in (-1, 1) for n in range(math.ceil(max(abs(low), high)))]
    shown = {0.0: 0.0, **{height(n * chart.limit): n * chart.limit for n in powers}}
    ticks = [t for t in sorted(shown) if low <= t <= high]
    names = [_plain(shown[t], form="+.3g" if shown[t] else "g") for t in ticks]
    axes.set_yticks([*ticks, top] if lost else ticks, [*names, "not finite"] if lost else names)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.axhspan(-1.0, 1.0, color=BAND, linewidth=0)
    axes.axhline(1.0, color=INK, linewidth=1.2, dashes=(4, 2))
    axes.annotate(
        chart.limit_label, (1, 1.0), (0, 4), ("axes fraction", "data"), "offset points", ha="right", color=MUTED
    )
    axes.annotate(_printable(chart.y_label), (0, 1), (-62, 17), "axes fraction", "offset points", color=MUTED)
    axes.set_xlabel(_printable(chart.x_label), fontsize=FONT)
    if chart.front:
        xs, ys = zip(*chart.front, strict=True)
        axes.step(xs, [height(y) for y in ys], where="post", color=MUTED, linewidth=1.2, alpha=0.7)
    taken: list[tuple[float, float, float, float]] = []
    places = [(p, *axes.transData.transform((p.x, height(p.y) if math.isfinite(p.y) else top))) for p in chart.points]
    taken += [(x - 5, y - 5, x + 5, y + 5) for _, x, y in places]
    for point, _, _ in places:
        at = (point.x, height(point.y) if math.isfinite(point.y) else top)
        colour = _colour(point.key)
        mark, face = ("X" if point.mark == "cross" else "o"), PAPER if point.mark == "hollow" else colour
        look: dict[str, Any] = {"color": colour, "markerfacecolor": face, "clip_on": False}
        if point.mark == "chosen":
            axes.plot(*at, "o", color=colour, markerfacecolor="none", markersize=15, markeredgewidth=1.6, clip_on=False)
        axes.plot(*at, mark, markersize=7.5, markeredgewidth=1.6, **look)
    for tick in axes.get_yticks():
        beside = axes.transData.transform((0.0, tick))[1]
        taken.append((0.0, beside - 7, 64.0, beside + 7))
    for point, x, y in reversed(places):
        if point.named:
            _beside(axes, _shortened(point.label, 30), x, y, taken)


def _beside(axes: Axes, text: str, x: float, y: float, taken: list[tuple[float, float, float, float]]) -> None:
    """Write `text` at the first free place beside the point (x, y), in px; where all are taken, nowhere."""
    wide, tall = 6.3 * len(text), FONT + 1.0
    right, left, middle = x + 10, x - 10 - wide, x - wide / 2
    spots = [(right, y - 4), (left, y - 4), (middle, y + 11), (middle, y - 11 - tall), (right, y + 8), (right, y - 18),
             (left, y + 8), (left, y - 18)]  # fmt: skip
    spots += [(min(max(middle, 68.0), WIDTH - wide - 2), y + way * n) for n in (26, 40, 54, 68, 82) for way in (-1, 1)]
    for a, b in spots:
        box = (a, b, a + wide, b + tall)
        inside = a >= 0 and a + wide <= WIDTH and b >= FOOT and b + tall <= POINTS_HEIGHT - 18
        if inside and not any(a < x1 and x0 < a + wide and b < y1 and y0 < b + tall for x0, y0, x1, y1 in taken):
            axes.annotate(text, (a, b), xycoords="figure pixels", color=INK)
            taken.append(box)
            return


# ------------------------------------------------------------------ heat maps


def _heat(figure: Figure, chart: HeatMap) -> None:
    axes = _rows(figure, chart.strips, chart.x_label)
    first, last = _exponents(chart)
    gone = first - ZEROS_APART  # where zeros are drawn
    axes.set_xlim(gone - 0.6, last + 1.1)
    axes.xaxis.set_major_locator(FixedLocator([gone + 0.5, *_powers(gone, first, last)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "0" if x < first else f"2{_superscript(round(x))}"))
    for place, strip in enumerate(chart.strips):
        top = _middle(place) - STRIP / 2

        def box(left: float, right: float, colour: str, strength: float = 1.0, top: float = top) -> None:
            look: dict[str, Any] = {"color": colour, "alpha": None if strength == 1.0 else strength}
            axes.add_patch(Rectangle((left, top), right - left, STRIP, linewidth=0, **look))

        least, normal, most = (min(max(limit, first), last + 1) for limit in strip.limits)
        box(least, most, BAND, 0.5)
        box(normal, most, BAND)
        cells = _clipped(strip.cells, first, last)
        peak = max((share for _, share in cells), default=0.0)
        for exponent, share in cells:
            if share > 0.0:
                full = strip.limits[1] <= exponent <= strip.limits[2]
                box(exponent, exponent + 1, HUES[0] if full else HUES[1], _strength(share / peak))
        if strip.zeros > 0.0:
            box(gone, gone + 1, MUTED, _strength(strip.zeros))
        for limit in strip.limits:
            if first <= limit <= last + 1:
                axes.plot([limit] * 2, [top - 2, top + STRIP + 2], color=INK, linewidth=1.2)


def _strength(share: float) -> float:
    """Return the opacity of a cell; roots keep small shares in sight."""
    return round(0.12 + 0.88 * math.sqrt(share), 2)


def _exponents(chart: HeatMap) -> tuple[int, int]:
    """Return the first and the last binade of the axis: where the numbers are, with their formats' ends if near."""
    found = [e for strip in chart.strips for e, share in strip.cells if share > 0.0] or [0]
    ends = [limit for strip in chart.strips for limit in strip.limits if abs(limit) <= NEAR_END]
    first = min([max(min(found), -FARTHEST), *(math.floor(end) for end in ends)])
    last = max([min(max(found), FARTHEST), *(math.ceil(end) for end in ends)])
    return first, max(last, first + 8)


def _powers(gone: int, first: int, last: int) -> list[int]:
    """Return the exponents that ticks stand at: as many as have room beside each other and beside the zero."""
    room = (last - gone) / TICKS
    step = next(step for step in (8, 16, 32, 64) if step >= room)
    return [e for e in range(-256, 257, step) if first <= e <= last and e - gone >= room]


def _clipped(cells: Sequence[tuple[int, float]], first: int, last: int) -> list[tuple[int, float]]:
    """Return cells with what lies beyond the axis in its outermost binades."""
    sums: dict[int, float] = {}
    for exponent, share in cells:
        inside = min(max(exponent, first), last)
        sums[inside] = sums.get(inside, 0.0) + share
    return sorted(sums.items())


def _superscript(exponent: int) -> str:
    return str(exponent).translate(SUPERSCRIPTS)


def _plain(number: float, _: float | None = None, form: str = ".6g") -> str:
    """Return a number as a tick label; large ones without an exponent."""
    text = f"{number:,.0f}" if abs(number) >= 10_000 else f"{number:{form}}"
    return text.replace("-", "\N{MINUS SIGN}")


# ------------------------------------------------------------------ SVG into a page


def _inside(svg: str) -> str:
    """Return the content of matplotlib's SVG file made fit to stand in a page."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]  # in a page SVG's elements have no namespace
        element.attrib = {name.partition("}")[2] or name: value for name, value in element.attrib.items()}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in {"metadata", "style"} or (child.tag in {"g", "defs"} and not len(child)):
                parent.remove(child)
    used = {name for element in root.iter() for value in element.attrib.values() for name in REFERENCE.findall(value)}
    for element in root.iter():
        if element.tag != "text":
            element.text = None
        element.tail = "\n"
        element.attrib = {name: _adapted(name, value) for name, value in _needed(element.attrib, used)}
    return "".join(ElementTree.tostring(child, encoding="unicode") for child in root)


def _needed(attributes: Mapping[str, str], used: set[str]) -> Iterator[tuple[str, str]]:
    for name, value in attributes.items():
        unused = name == "id" and value not in used
        if not unused and not (name == "transform" and value.startswith(("rotate(-0 ", "rotate(0 "))):
            yield name, value


def _adapted(name: str, value: str) -> str:
    """Return the value of an attribute with the page's colours, font and names, and hundredths of a px at most."""
    if name == "style":
        value = re.sub(r"font: ([\d.]+)px .*?(?=;|$)", r"font-size: \1px", value)  # matplotlib writes a plain font so
        value = re.sub(r"font-family: .*?(; |$)", "", value)  # and otherwise its properties apart
        for placeholder, paint in PAINT.items():
            value = value.replace(placeholder, paint)
        return value
    if name == "id":
        return f"@{value}"
    if name in {"d", "x", "y", "transform"}:
        value = " ".join(re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), value).split())
    return REFERENCE.sub(lambda m: m[0].replace("#", "#@"), value)
