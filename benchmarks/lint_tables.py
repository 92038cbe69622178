"""The tables of docs/lint.md, docs/tables/lint_*.md and docs/verdicts/loop.md; `make tables`.

They are made from the linter's registry, from the catalogue of mistakes and from benchmarks/results/lint.json.
"""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table
from benchmarks.reports import load
from halfstep.advise.lint import RULES
from halfstep.mistakes import MISTAKES


def lint_blocks() -> dict[str, str]:
    """Return the tables of static and of traced rules and of public scripts, by the names of their markers."""
    report = load("lint.json")
    made = {"lint scripts": _scripts(report), "lint right": _right(report), "lint missed": _missed()}
    mistakes = [[f"`{m.code}`", _cell(m.title), _cell(m.why), _cell(m.fix)] for m in MISTAKES.values()]
    made["loop mistakes"] = table(["number", "mistake", "what it does", "what to change"], mistakes)
    for name, traced in (("lint static", False), ("lint traced", True)):
        rules = [rule for rule in RULES.values() if rule.traced is traced]
        rows = [[f"`{r.code}`", r.severity, _cell(r.title), _cell(r.why), _cell(r.fix)] for r in rules]
        made[name] = table(["code", "severity", "what", "why", "fix"], rows) if rows else "None so far."
    return made


def _scripts(report: dict[str, Any]) -> str:
    """Return the table of findings in public scripts: all, and without names of torch.cuda.amp."""
    found = report["summary"]
    rows = []
    for name, shares in found.items():
        if isinstance(shares, dict) and "without HS026" in shares:
            sets = {s["repository"] for s in report["scripts"] if name.startswith((s["set"], "all"))}
            files = sum(s["repository"] in sets for s in report["scripts"])
            rows.append([name, str(files), *(_of(part) for part in (shares, shares["without HS026"]))])
    return table(["scripts, rules", "files", "true findings", "without HS026"], rows)


def _right(report: dict[str, Any]) -> str:
    """Return the sentences of docs/lint.md."""
    first, now = (report["summary"][name] for name in ("all, before mending", "all, now"))
    files = len(report["scripts"])
    return (
        f"Over {files} public training scripts, {_of(now)} of the findings of the rules that read the source are "
        f"right; before false findings were mended it was {_of(first)}. Without names of torch.cuda.amp (`HS026`), "
        f"which are easy to find, it is {_of(now['without HS026'])}, and was {_of(first['without HS026'])}. "
        "Rules that follow methods and values came later, and were not scored on these scripts "
        "([method and table](tables/lint_scripts.md))."
    )


def _missed() -> str:
    """Return the sentences of docs/lint.md on seeded mistakes, and the kinds that are missed."""
    report = load("lint_mistakes.json")
    found, blind = report["summary"], report["blind"]
    shares = {name: f"{n['found']} of {n['scripts']} ({n['recall']:.0%})" for name, n in found.items()}
    both, kinds = found["both"], found["both"]["missed"]
    missed = [f"{kind} ({', '.join(shapes)})" if shapes != ["file"] else kind for kind, shapes in kinds.items()]
    first, second = (f"{n['found']} of {n['scripts']} ({n['recall']:.0%})" for n in blind.values())
    wrong = " and ".join(f"{n['wrong']} of {n['wrong'] + n['right']}" for n in blind.values())
    return (
        f"In scripts that were not known when its rules were written, it finds about two of three mistakes: {first} in "
        f"a set that was scored before a rule was changed for it, {second} in a second set that was written after "
        f"the misses of the first one were cured, and scored once; {wrong} findings were wrong. The second set missed: "
        f"{'; '.join(blind['second']['missed'])}.\n\nToday, with both sets known: of "
        f"{both['scripts']} scripts with a seeded mistake, a finding points to it in {shares['both']}; in the half "
        f"that was written before the rules for it and held out, in {shares['held out']}. {both['wrong']} of "
        f"{both['right'] + both['wrong']} findings are wrong. Missed: {'; '.join(missed) or 'none of these kinds'}."
    )


def _of(share: dict[str, Any]) -> str:
    return f"{share['true']} of {share['findings']} ({share['share']:.0%})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
