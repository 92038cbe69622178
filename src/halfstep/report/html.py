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

PAGE = """\
{%- macro key(look) -%}
<svg viewBox="0 0 26 10" aria-hidden="true"><line x1="0" y1="5" x2="26" y2="5" style="
{%- if look.light %}stroke-dasharray: 7 3; {% endif -%}
stroke-width: 3; stroke: var(--{{ "hue%d" % look.hue if look.hue else "ink" }})"/></svg>
{%- endmacro -%}
{%- macro show(block) -%}
{%- set kind = block.__class__.__name__ -%}
{%- if kind == "Paragraph" %}
<p>{{ block.text }}</p>
{%- elif kind == "Note" %}
<p class="note">{{ block.text }}</p>
{%- elif kind == "Code" %}
<pre>{{ block.text | e }}</pre>
{%- elif kind == "Bullets" %}
<ul>{% for item in block.items %}<li>{{ item }}</li>{% endfor %}</ul>
{%- elif kind == "Facts" %}
<div class="facts">
{%- for fact in block.facts %}
<div class="fact {{ fact.tone }}"><h3>{{ fact.heading }}</h3><p class="first">{{ fact.text }}</p>
{%- for text in fact.more %}<p class="more">{{ text }}</p>{% endfor %}</div>
{%- endfor %}
</div>
{%- elif kind == "Table" %}
<div class="scroll" role="region" tabindex="0" aria-label="{{ block.caption }}"><table>
<caption>{{ block.caption }}</caption>
<thead><tr>{% for header in block.headers -%}
<th scope="col"{% if loop.index0 in block.words %} class="words"{% endif %}>{{ header }}</th>
{%- endfor %}</tr></thead>
<tbody>
{%- for row in block.rows %}
<tr>
{%- for cell in row -%}
{%- set look = "words" if loop.index0 in block.words else cell.tone -%}
{%- set tag, scope = ("th", ' scope="row"') if loop.first else ("td", "") -%}
<{{ tag }}{{ scope | safe }}{% if look %} class="{{ look }}"{% endif %}>{{ cell.text }}</{{ tag }}>
{%- endfor -%}
</tr>
{%- endfor %}
</tbody></table></div>
{%- elif kind == "Figure" %}
<figure>
<h3>{{ block.heading }}</h3>
{{ picture(block.chart, block.alt) }}
<figcaption>{{ block.caption }}</figcaption>
</figure>
{%- elif kind == "Gallery" %}
{%- if block.legend %}
<ul class="legend">{% for label, look in block.legend %}<li>{{ key(look) }}{{ label }}</li>{% endfor %}</ul>
{%- endif %}
<div class="gallery">{% for figure in block.figures %}{{ show(figure) }}{% endfor %}
</div>
{%- elif kind == "Details" %}
<details><summary>{{ block.summary }}</summary>{% for inner in block.blocks %}{{ show(inner) }}{% endfor %}
</details>
{%- endif -%}
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ document.title }}</title>
<style>
{{ style }}</style>
</head>
<body>
<main>
<header>
<h1>{{ document.title }}</h1>
<p class="lead">{{ document.lead }}</p>
</header>
{%- for section in document.sections %}
<section>
<h2>{{ section.heading }}</h2>
{%- for block in section.blocks %}{{ show(block) }}{% endfor %}
</section>
{%- endfor %}
{%- if document.footer %}
<footer><p>{{ document.footer }}</p></footer>
{%- endif %}
</main>
</body>
</html>
"""


def render(document: Document) -> str:
    """Return `document` as one HTML file; text is escaped, equal documents give equal files."""
    import jinja2  # here: importing halfstep imports torch and little else
    from markupsafe import Markup

    def picture(chart: Chart, alt: str) -> Any:
        made = draw(chart)
        head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">\n').format(alt, made.width, made.height)
        return head + Markup(made.body + "\n</svg>")

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_kept_together)
    page = environment.from_string(PAGE).render(document=document, style=Markup(style_sheet()), picture=picture)
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


def _kept_together(value: Any) -> Any:
    """Return text in which no line ends between a number and its unit; markup stays as it is."""
    return UNIT.sub("\N{NO-BREAK SPACE}", value) if type(value) is str else value
