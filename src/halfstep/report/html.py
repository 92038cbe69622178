"""HTML: a document as one file that needs nothing else: no network, no script, no font, light and dark."""

from __future__ import annotations

import importlib
import itertools
import re
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError
from halfstep.report.charts import Chart
from halfstep.report.document import Document
from halfstep.report.style import picture_style, style_sheet

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["MissingExtraError", "picture_file", "render", "require_extra"]

UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMG]?B|ms)(?!\w))")  # the blank between a number and its unit
NEEDED = ("jinja2", "matplotlib.figure")

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
<th scope="col"
{%- if block.rows and block.rows[0][loop.index0].tone == "words" %} class="words"{% endif %}>{{ header }}</th>
{%- endfor %}</tr></thead>
<tbody>
{%- for row in block.rows %}
<tr>
{%- for cell in row -%}
{%- if loop.first %}<th scope="row"{% if cell.tone %} class="{{ cell.tone }}"{% endif %}>{{ cell.text }}</th>
{%- else %}<td{% if cell.tone %} class="{{ cell.tone }}"{% endif %}>{{ cell.text }}</td>{% endif -%}
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


class MissingExtraError(HalfstepError, ImportError):
    """Packages that only reports need are not installed."""


def require_extra(wanted: str) -> None:
    """Make sure that what draws and renders is installed.

    Raises:
        MissingExtraError: it is not; the message has the command that installs it.
    """
    for module in NEEDED:
        try:
            importlib.import_module(module)
        except ImportError as error:
            name = module.partition(".")[0]
            raise MissingExtraError(
                f"{wanted} needs {name}, which is not installed; pip install 'halfstep[plot]'"
            ) from error


def render(document: Document) -> str:
    """Return `document` as one HTML file; text is escaped, equal documents give equal files.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    require_extra("an HTML report")
    import jinja2
    from markupsafe import Markup

    from halfstep.report.pictures import draw

    count = itertools.count(1)

    def picture(chart: Chart, alt: str) -> Markup:
        made = draw(chart)
        number = next(count)  # an id may occur once in a page, and pictures share theirs
        inside = made.body.replace('id="@', f'id="p{number}-').replace("#@", f"#p{number}-")
        head = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">').format(alt, made.width, made.height)
        return head + Markup(inside) + Markup("</svg>")

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_kept_together)
    page = environment.from_string(PAGE).render(document=document, style=Markup(style_sheet()), picture=picture)
    return f"{page}\n"


def picture_file(chart: Chart, alt: str) -> str:
    """Return `chart` as an SVG file of its own, for other pages: light and dark, with its own background.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    require_extra("a picture")
    from markupsafe import Markup

    from halfstep.report.pictures import draw

    made = draw(chart)
    inside = made.body.replace('id="@', 'id="').replace("#@", "#")
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        'width="{0}" height="{1}" viewBox="0 0 {0} {1}">\n<title>{2}</title>\n<style>\n{3}</style>\n'
        '<rect width="{0}" height="{1}" rx="8" style="fill: var(--paper)"/>\n'
    ).format(made.width, made.height, alt, Markup(picture_style()))
    return f"{head}{inside}</svg>\n"


def _kept_together(value: Any) -> Any:
    """Return text in which no line ends between a number and its unit; markup stays as it is."""
    return UNIT.sub("\N{NO-BREAK SPACE}", value) if type(value) is str else value
