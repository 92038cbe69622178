from __future__ import annotations

import dataclasses
import math
import re
from xml.etree import ElementTree

import pytest

from halfstep.report import Bar, BarChart, Dot, DotChart, HeatMap, Key, LineChart, Point, PointChart, Series, Strip
from halfstep.report.charts import COLOURS, Chart, draw
from halfstep.report.charts import _Drawing as Drawing

LINES = LineChart(
    x_label="step",
    series=(
        Series(label="a", x=(1.0, 2.0, 3.0), y=(1.0, math.nan, 3.0), marks=(2.0,)),
        Series(label="b", x=(1.0, 2.0, 3.0), y=(2.0, 1.0, 1.0), key=Key(colour=1, light=True)),
    ),
)
BARS = BarChart(
    x_label="time",
    bars=(
        Bar(label="one", text="1.00", value=1.0, low=0.9, high=1.1, key=Key(colour=1)),
        Bar(label="none", text="not run", value=None),
        Bar(label="far", text="28.9", value=28.9, low=28.0, high=30.0, key=Key(colour=8)),
    ),
    line=1.0,
    band=(0.98, 1.02),
)
DOTS = DotChart(
    x_label="minus fp32",
    dots=(
        Dot(label="near", text="0.2", value=0.2, low=-0.1, high=0.5, key=Key(colour=2)),
        Dot(label="open", text="0.9", value=0.9, low=-0.2, high=2.0, mark="hollow"),
        Dot(label="far", text="-80", value=-80.0, low=-90.0, high=-70.0, mark="cross"),
        Dot(label="lost", text="diverged", value=None, mark="cross"),
    ),
    margin=1.0,
)
HEAT = HeatMap(
    x_label="magnitude",
    strips=(
        Strip(label="inside", text="fp16", cells=((-4, 0.2), (0, 0.6)), zeros=0.2, limits=(-24.0, -14.0, 16.0)),
        Strip(label="below", text="fp16", cells=((-30, 0.9), (-20, 0.1)), zeros=0.0, limits=(-24.0, -14.0, 16.0)),
        Strip(label="wide", text="bf16", cells=((-90, 0.5), (3, 0.5)), zeros=0.0, limits=(-133.0, -126.0, 128.0)),
        Strip(label="nothing", text="", cells=(), zeros=0.0, limits=(-24.0, -14.0, 16.0)),
    ),
)


POINTS = PointChart(
    x_label="time",
    y_label="loss rise, %",
    points=(
        Point(label="lost", x=1.2, y=math.inf, named=True, mark="cross", key=Key(colour=2)),
        Point(label="far", x=0.4, y=250.0, named=True, mark="cross", key=Key(colour=2)),
        Point(label="near", x=0.45, y=-0.2, mark="hollow", key=Key(colour=3)),
        Point(label="best", x=0.5, y=0.1, named=True, mark="chosen", key=Key(colour=1)),
    ),
    limit=1.0,
    limit_label="bound",
    front=((0.4, 250.0), (0.5, 0.1)),
)


def parsed(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(f"<svg>{drawing.body}</svg>")


def words(drawing: Drawing) -> list[str]:
    return ["".join(text.itertext()) for text in parsed(drawing).iter("text")]


def widths(drawing: Drawing) -> dict[str, list[float]]:
    """Return the widths of filled shapes by their paint."""
    found: dict[str, list[float]] = {}
    for shape in parsed(drawing).iter("rect"):
        paint = re.search(r"fill: (var\(--\w+\))", shape.get("style", ""))
        assert paint is not None
        found.setdefault(paint[1], []).append(float(shape.get("width", "nan")))
    return found


@pytest.mark.parametrize("chart", [LINES, BARS, DOTS, HEAT, POINTS], ids=lambda c: type(c).__name__)
def test_a_picture_has_no_colour_font_or_style_of_its_own(chart: Chart) -> None:
    drawing = draw(chart)
    root = parsed(drawing)
    assert "var(--ink)" in drawing.body
    assert not re.search(r"#[0-9a-fA-F]{6}|#[0-9a-fA-F]{3}\b|rgb|DejaVu|http|xmlns", drawing.body)
    assert not [element for element in root.iter() if element.tag in {"style", "metadata", "image", "script"}]
    assert not any(e.get(name) for e in root.iter() for name in ("class", "font-family"))
    assert not any(e.get(name) for e in root.iter() for name in ("id", "href"))  # pictures share a page


@pytest.mark.parametrize("chart", [LINES, BARS, DOTS, HEAT, POINTS], ids=lambda c: type(c).__name__)
def test_equal_charts_give_equal_pictures(chart: Chart) -> None:
    assert draw(chart).body == draw(chart).body


def test_a_dollar_is_a_dollar_and_markup_is_text() -> None:
    label = 'font: 9px x; $x^2$ <b>& --> " id="a" 混合'
    chart = BarChart(x_label=label, bars=(Bar(label=label, text=label[:3], value=1.0),))
    assert words(draw(chart)).count(label) == 2
    assert "a b c" in words(draw(BarChart(x_label="a\nb\0c", bars=())))


def test_bars_begin_at_zero_and_are_as_long_as_their_values() -> None:
    chart = BarChart(
        x_label="MB",
        bars=(
            Bar(label="a", text="4", value=4.0, key=Key(colour=1)),
            Bar(label="b", text="1", value=1.0, key=Key(colour=2)),
        ),
    )
    found = widths(draw(chart))
    assert found["var(--hue1)"][0] == pytest.approx(4 * found["var(--hue2)"][0], rel=0.01)


def test_a_bar_off_the_scale_does_not_flatten_the_others() -> None:
    drawing = draw(BARS)
    found = widths(drawing)
    assert max(found["var(--hue1)"]) > 0.8 * drawing.width
    assert {"one", "1.00", "none", "not run", "far", "28.9"} <= set(words(drawing))


def test_colours_start_again_when_they_are_used_up() -> None:
    assert Key(colour=COLOURS + 2).hue == 2 and Key(colour=0).hue == 0
    bars = tuple(Bar(label="a", text="1", value=1.0, key=Key(colour=i)) for i in range(1, COLOURS + 3))
    assert set(widths(draw(BarChart(x_label="", bars=bars)))) == {f"var(--hue{i})" for i in range(1, COLOURS + 1)}


def test_a_dot_far_outside_is_an_arrow_at_the_edge() -> None:
    assert words(draw(DOTS))[5:9] == ["far", "-80", "lost", "diverged"]
    ticks = [w for w in words(draw(DOTS)) if w in {"−1", "0", "+1"}]
    assert ticks == ["−1", "0", "+1"]
    arrows = [e.get("d", "") for e in parsed(draw(DOTS)).iter("path") if e.get("d", "").endswith("Z")]
    assert len(arrows) == 1 and arrows[0].startswith("M 8 ")  # its tip lies left of the edge of the axes, at 12


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    chart = LineChart(
        x_label="step",
        series=(Series(label="a", x=(1, 2, 3, 4, 5), y=(1.0, 2.0, math.inf, 2.0, 1.0), key=Key(colour=3)),),
    )
    (curve,) = (p.get("d", "") for p in parsed(draw(chart)).iter("path") if "hue3" in p.get("style", ""))
    assert curve.count("M") == 2
    nothing = LineChart(x_label="step", series=(Series(label="a", x=(1.0,), y=(math.nan,), marks=(1.0,)),))
    assert "no finite value" in words(draw(nothing))


def test_small_numbers_share_one_power_of_ten() -> None:
    chart = LineChart(x_label="step", series=(Series(label="a", x=(1.0, 2.0), y=(0.0, 5e-5)),), zero_line=True)
    assert "× 10⁻⁵" in words(draw(chart)) and not any("e-" in word for word in words(draw(chart)))


def test_a_log_scale_needs_positive_values() -> None:
    up = Series(label="a", x=(1.0, 2.0), y=(0.1, 10.0))
    assert {"0.1", "1", "10"} <= set(words(draw(LineChart(x_label="", series=(up,), log=True))))
    down = Series(label="a", x=(1.0, 2.0), y=(-1.0, 10.0))
    assert "5" in words(draw(LineChart(x_label="", series=(down,), log=True)))


def test_charts_without_rows_are_drawn_too() -> None:
    assert draw(BarChart(x_label="x", bars=())).height > 0
    assert draw(DotChart(x_label="x", dots=(), margin=1.0)).height > 0
    assert draw(LineChart(x_label="x", series=())).height > 0


def test_long_labels_lose_their_middle_before_they_meet_the_number() -> None:
    long = f"transformer.h.0.{'n' * 90}.c_attn linear"
    drawn = words(draw(BarChart(x_label="x", bars=(Bar(label=long, text="1.000", value=1.0),))))
    (label, *_) = (w for w in drawn if "n" in w)
    assert label.startswith("transfo") and label.endswith(".c_attn linear") and "…" in label and len(label) == 40


def test_ticks_of_a_wide_heat_map_keep_their_distance() -> None:
    cells = ((-60, 0.5), (60, 0.5))
    strip = Strip(label="a", text="", cells=cells, zeros=0.1, limits=(-24.0, -14.0, 16.0))
    found = words(draw(HeatMap(x_label="", strips=(strip,))))
    assert {"0", "2⁻¹⁶", "2⁰", "2¹⁶"} <= set(found) and not {"2⁻⁶⁴", "2⁻⁵⁶", "2⁻⁸", "2⁸"} & set(found)


def test_a_heat_map_shows_zeros_apart_and_numbers_below_full_precision_in_another_colour() -> None:
    def strip(exponent: int, zeros: float) -> HeatMap:
        cells = ((exponent, 1.0 - zeros),)
        limits = (-24.0, -14.0, 16.0)
        return HeatMap(x_label="", strips=(Strip(label="a", text="", cells=cells, zeros=zeros, limits=limits),))

    assert {"var(--hue1)"} == {paint for paint in widths(draw(strip(0, 0.0))) if "hue" in paint}
    for exponent in (-20, -30, 17):
        assert {"var(--hue2)"} == {paint for paint in widths(draw(strip(exponent, 0.0))) if "hue" in paint}
    assert "var(--muted)" in widths(draw(strip(0, 0.5))) and "var(--muted)" not in widths(draw(strip(0, 0.0)))


def test_the_axis_of_a_heat_map_has_powers_of_two_and_the_ends_of_near_formats() -> None:
    found = words(draw(HEAT))
    assert {"0", "2⁻²⁴", "2⁰", "2¹⁶", "inside", "bf16"} <= set(found) and "2⁻¹²⁸" not in found


def test_points_are_named_where_there_is_room_and_the_limit_is_written() -> None:
    found = words(draw(POINTS))
    assert {"lost", "far", "best", "bound", "not finite", "loss rise, %", "+1", "+10", "+100"} <= set(found)
    assert "near" not in found
    crowd = tuple(Point(label=f"point {i}", x=1.0, y=0.001 * i, named=True) for i in range(60))
    names = [w for w in words(draw(dataclasses.replace(POINTS, points=crowd, front=()))) if w.startswith("point")]
    assert 0 < len(names) < 60 and "point 59" in names  # the last is named first


def test_points_of_one_place_and_none_at_all_are_drawn() -> None:
    one = Point(label="one", x=1.0, y=0.0, named=True)
    assert "one" in words(draw(dataclasses.replace(POINTS, points=(one,), front=())))
    assert "one" not in words(draw(dataclasses.replace(POINTS, points=(), front=())))
