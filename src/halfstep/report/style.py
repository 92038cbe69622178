"""How a report looks: colours for light and dark, and the style sheet.

The hues are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers can tell apart. Their
lightness was changed until each has the contrast that graphics need on its page (WCAG 2.2, 1.4.11) and any two stay
apart for readers without red or green cones; the tests compute both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["DARK", "LIGHT", "picture_style", "style_sheet"]

LIGHT: Mapping[str, str] = {
    "page": "#f5f6f7", "paper": "#ffffff", "ink": "#1b1f24", "muted": "#57606a", "faint": "#d0d7de", "band": "#e3e8ee",
    "good": "#0a6b4a", "bad": "#b3261e", "open": "#7a5200", "note": "#fff4d6",
    "hue1": "#0072b2", "hue2": "#a84300", "hue3": "#109a78", "hue4": "#8f3f70", "hue5": "#b9831f", "hue6": "#3890cc",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "page": "#101316", "paper": "#191d21", "ink": "#e8eaed", "muted": "#a3adb8", "faint": "#363d45", "band": "#2b333c",
    "good": "#5fd3a6", "bad": "#ff8f85", "open": "#f0c063", "note": "#33290f",
    "hue1": "#2f8fea", "hue2": "#d8650f", "hue3": "#22cf98", "hue4": "#bb689f", "hue5": "#f3c13a", "hue6": "#8ccbf0",
}  # fmt: skip

RULES = Path(__file__).with_name("style.css")


def style_sheet() -> str:
    """Return the style sheet of a report; dark where the reader's system is, except on paper."""
    return f"{_schemes()}\n{RULES.read_text(encoding='utf-8')}"


def picture_style() -> str:
    """Return the style sheet of a picture that stands alone."""
    family = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
    return f"{_schemes()}\nsvg {{ font-family: {family}; }} svg * {{ stroke-linejoin: round; }}\n"


def _schemes() -> str:
    light, dark = (" ".join(f"--{name}: {value};" for name, value in c.items()) for c in (LIGHT, DARK))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )
