"""How a report looks: colours for light and dark, and the style sheet.

The hues are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers can tell apart. Their
lightness was changed until each has the contrast that graphics need on its page (WCAG 2.2, 1.4.11) and any two stay
apart for readers without red or green cones; the tests compute both.
"""

from __future__ import annotations

from collections.abc import Mapping

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

RULES = """
*, *::before, *::after { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", Arial, sans-serif; overflow-wrap: break-word; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 0 0 10px; letter-spacing: -0.005em; }
h3 { font-size: 1rem; line-height: 1.35; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 75ch; }
ul { margin: 0 0 14px; padding-left: 20px; max-width: 75ch; }
.lead { color: var(--muted); margin-bottom: 20px; }
section { background: var(--paper); border: 1px solid var(--faint); border-radius: 10px; padding: 22px 22px 14px;
  margin: 0 0 20px; }
section > :last-child { margin-bottom: 8px; }
.note { background: var(--note); border-left: 4px solid var(--open); border-radius: 4px; padding: 8px 12px;
  max-width: none; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); gap: 12px;
  margin: 0 0 18px; }
.fact { border: 1px solid var(--faint); border-top: 4px solid var(--faint); border-radius: 6px;
  padding: 10px 14px 4px; }
.fact h3 { color: var(--muted); font-size: 0.85rem; font-weight: 600; }
.fact p { margin-bottom: 8px; } .fact .first { font-weight: 600; }
.fact .more { color: var(--muted); font-size: 0.9rem; }
.fact.good { border-top-color: var(--good); } .fact.bad { border-top-color: var(--bad); }
.fact.open { border-top-color: var(--open); }
.gallery { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 22px 32px;
  margin: 0 0 18px; }
figure { margin: 0; min-width: 0; max-width: 460px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; }
figcaption { color: var(--muted); font-size: 0.9rem; margin-top: 6px; }
figcaption h3 { color: var(--ink); font-size: 1rem; }
.legend { list-style: none; max-width: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0;
  margin: 0 0 10px; font-size: 0.9rem; }
.legend svg { width: 26px; height: 10px; margin-right: 6px; vertical-align: middle; }
.scroll { overflow-x: auto; margin: 0 0 18px; border: 1px solid var(--faint); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 8px 12px; }
th, td { padding: 6px 12px; text-align: right; white-space: nowrap; border-top: 1px solid var(--faint); }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; white-space: normal; min-width: 5.5em; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tbody th { font-weight: 600; }
td.words { white-space: normal; text-align: left; min-width: 15em; }
th.words { white-space: normal; text-align: left; min-width: 9em; }
.good { color: var(--good); } .bad { color: var(--bad); } .open { color: var(--open); }
.fact.good, .fact.bad, .fact.open { color: inherit; }
pre { margin: 0 0 14px; padding: 10px 12px; background: var(--page); border: 1px solid var(--faint); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 0.85rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "Liberation Mono", monospace; }
details { margin: 0 0 12px; } summary { cursor: pointer; font-weight: 600; padding: 4px 0; }
footer { color: var(--muted); font-size: 0.85rem; }
:focus-visible { outline: 2px solid var(--hue1); outline-offset: 2px; }
@media (max-width: 560px) {
  main { padding: 16px 7px 28px; } section { padding: 14px 11px 6px; border-radius: 8px; } h1 { font-size: 1.45rem; }
}
@media print {
  section { break-inside: auto; border: 0; padding: 0; } figure, .fact, tr { break-inside: avoid; }
}
"""


def style_sheet() -> str:
    """Return the style sheet of a report; dark where the reader's system is, except on paper."""
    return _schemes() + RULES


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
