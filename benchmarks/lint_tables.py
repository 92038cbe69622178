"""The tables of docs/lint.md, made from the linter's registry; `make tables`."""

from __future__ import annotations

from benchmarks.markdown import table
from halfstep.advise.lint import RULES


def lint_blocks() -> dict[str, str]:
    """Return the tables of static and of traced rules, by the names of their markers."""
    made = {}
    for name, traced in (("lint static", False), ("lint traced", True)):
        rules = [rule for rule in RULES.values() if rule.traced is traced]
        rows = [[f"`{r.code}`", r.severity, _cell(r.title), _cell(r.why), _cell(r.fix)] for r in rules]
        made[name] = table(["code", "severity", "what", "why", "fix"], rows) if rows else "None so far."
    return made


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
