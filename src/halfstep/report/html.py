"""HTML: a document as one file that needs nothing else: no network, no script, no font, light and dark.

The hues are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers can tell apart. Their
lightness was changed until each has the contrast that graphics need on its page (WCAG 2.2, 1.4.11) and any two stay
apart for readers without red or green cones; the tests compute both.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.report.charts import Chart, draw
from halfstep.report.document import Document

UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMG]?B|ms)(?!\w))")  # the blank between a number and its unit

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
PAGE = Path(__file__).with_name("page.html")


def render(document: Document) -> str:
    """Return `document` as one HTML file; text is escaped, equal documents give equal files."""
    import jinja2  # here: a program that writes no page needs none
    from markupsafe import Markup

    def picture(chart: Chart, alt: str) -> Any:
        made = draw(chart)
        head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">\n').format(alt, made.width, made.height)
        return head + Markup(made.body + "\n</svg>")

    def kept_together(value: Any) -> Any:  # no line ends between a number and its unit
        return UNIT.sub("\N{NO-BREAK SPACE}", value) if type(value) is str else value

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=kept_together)
    template = environment.from_string(PAGE.read_text(encoding="utf-8"))
    page = template.render(document=document, style=Markup(style_sheet()), picture=picture)
    return f"{page}\n"


def write_page(document: Document, path: str | Path) -> None:
    """Write `document` to `path` as one HTML file that needs nothing else."""
    Path(path).write_text(render(document), encoding="utf-8")


def picture_file(chart: Chart, alt: str) -> str:
    """Return `chart` as an SVG file of its own, for other pages: light and dark, with its own background."""
    made = draw(chart)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'width="{made.width}" height="{made.height}" viewBox="0 0 {made.width} {made.height}">\n'
        f"<title>{html.escape(alt)}</title>\n<style>\n{picture_style()}</style>\n"
        f'<rect width="{made.width}" height="{made.height}" rx="8" style="fill: var(--paper)"/>\n{made.body}\n</svg>\n'
    )


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
