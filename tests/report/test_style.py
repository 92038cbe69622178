from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from halfstep.report.charts import COLOURS
from halfstep.report.files import SCHEMES, style_sheet

WORDS = ("ink", "muted", "good", "bad", "open")
HUES = tuple(f"hue{i}" for i in range(1, COLOURS + 1))

LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w+);", part)) for part in SCHEMES.read_text("utf-8").split("@media"))


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_words_and_curves_can_be_seen_in_both_schemes(scheme: Mapping[str, str]) -> None:
    for ground in ("page", "paper"):
        assert all(contrast(scheme[word], scheme[ground]) >= 4.5 for word in WORDS)  # WCAG 2.2, 1.4.3
        assert all(contrast(scheme[hue], scheme[ground]) >= 3.0 for hue in HUES)  # 1.4.11
    assert all(contrast(scheme[hue], scheme["band"]) >= 2.5 for hue in HUES)
    assert contrast(scheme["ink"], scheme["note"]) >= 4.5


def seen(colour: str, kind: str) -> tuple[float, ...]:
    """Return linear colour as an eye without red or without green cones sees it (Vienot, Brettel and Mollon 1999)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    mixed = {"protan": (0.11238, 0.88762, 0.00401), "deutan": (0.29275, 0.70725, -0.02234)}[kind]
    yellow = mixed[0] * red + mixed[1] * green
    return yellow, yellow, mixed[2] * (red - green) + blue


@pytest.mark.parametrize("kind", ["protan", "deutan"])
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stay_apart_without_red_or_green_cones(scheme: Mapping[str, str], kind: str) -> None:
    places = [tuple(max(0.0, v) ** (1 / 2.2) for v in seen(scheme[name], kind)) for name in ("ink", *HUES)]
    gaps = [
        sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5 for i, p in enumerate(places) for q in places[:i]
    ]
    assert min(gaps) > 0.15  # black and white are 1.73 apart


def test_both_schemes_have_the_same_names_and_every_name_used_exists() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert set(re.findall(r"var\(--(\w+)\)", style_sheet())) <= set(LIGHT)
    assert style_sheet().count("{") == style_sheet().count("}")


def test_the_style_sheet_fetches_nothing() -> None:
    assert not re.search(r"url\(|@import|@font-face|http", style_sheet())
