"""HTML: a document as one file that needs nothing else: no network, no script, no font, light and dark."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from halfstep.report.charts import Chart, draw
from halfstep.report.document import Document
from halfstep.report.style import picture_style, style_sheet

__all__ = ["picture_file", "render", "write_page"]

UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMG]?B|ms)(?!\w))")  # the blank between a number and its unit

PAGE = Path(__file__).with_name("page.html")


def render(document: Document) -> str:
    """Return `document` as one HTML file; text is escaped, equal documents give equal files."""
    import jinja2  # here: importing halfstep imports torch and little else
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
