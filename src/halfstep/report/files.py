"""Files: a document as one HTML file that needs nothing else (no network, script or font; light and dark), JSON, SARIF.

The hues are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers can tell apart. Their
lightness was changed until each has the contrast that graphics need on its page (WCAG 2.2, 1.4.11) and any two stay
apart for readers without red or green cones; the tests compute both.

SARIF 2.1.0 is findings as editors and code hosts read them:
https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfstep.report.charts import Chart, draw
from halfstep.report.document import Document

UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMG]?B|ms)(?!\w))")  # the blank between a number and its unit

SCHEMES, RULES, PAGE = (Path(__file__).with_name(name) for name in ("colours.css", "style.css", "page.html"))


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
    return re.sub(r"\n +", " ", SCHEMES.read_text(encoding="utf-8")).rstrip()


# ------------------------------------------------------------------ files for programs: JSON without nan, and SARIF

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_log(rules: Mapping[str, str], page: str, results: Iterable[tuple[str, str, str, str, int]]) -> dict[str, Any]:
    """Return a SARIF log of plain values.

    Args:
        rules: name -> title.
        page: the page on a rule, in which ``{}`` stands for its name.
        results: (rule, level, text, file, line) of each finding. Its level is "error", "warning" or "note"; the first
            line of its text is shown in lists; "" for no file, 0 for no line.
    """
    names = list(rules)
    described = [
        {"id": name, "shortDescription": {"text": rules[name]}, "help": {"text": f"See {page.format(name)}."}}
        for name in names
    ]
    found = [
        {
            "ruleId": rule,
            "ruleIndex": names.index(rule),
            "level": level,
            "message": {"text": text},
            "locations": [_location(file, line)] if file else [],
        }
        for rule, level, text, file, line in results
    ]
    tool = {"driver": {"name": "halfstep", "rules": described}}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": tool, "results": found}]}


def _location(file: str, line: int) -> dict[str, Any]:
    """Return where a finding is; paths below the current folder are relative to it, as SARIF's readers expect."""
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    uri = path.as_uri() if path.is_absolute() else path.as_posix()
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line:
        place["region"] = {"startLine": line}
    return {"physicalLocation": place}


def strict_json(value: Any, path: str | Path | None = None) -> str:
    """Return what `plain` makes of a value as JSON, nan and inf as null; also write it to `path`, if given."""
    text = json.dumps(plain(value, finite=True), indent=1) + "\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def plain(value: Any, *, finite: bool = False) -> Any:
    """Return dataclasses as dicts, policies as TOML, tuples as lists, all they hold too; `finite`: nan, inf as None."""
    if hasattr(value, "to_toml") and not hasattr(value, "record"):  # a policy, without an import of torch
        return value.to_toml()
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, finite=finite) for item in value]
    return None if finite and isinstance(value, float) and not math.isfinite(value) else value
