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
        f"it is {_of(now['without HS026'])}, and was {_of(first['without HS026'])}. "
        "Rules that follow methods and values came later, and were not scored on these scripts "
        "([method and table](tables/lint_scripts.md))."
    )


def _missed() -> str:
    """Return the sentences of docs/lint.md on seeded mistakes, and the kinds that are missed."""
    report = load("lint_mistakes.json")
    found, blind = report["summary"], report["blind"]
    shares = {name: f"{n['found']} of {n['scripts']} ({n['recall']:.0%})" for name, n in found.items()}
    both, kinds = found["both"], found["both"]["missed"]
    later = {name: found[name]["missed"] for name in list(blind)[2:]}
    known = {kind for part in later.values() for kind in part}
    missed = [f"{k} ({', '.join(v)})" if v != ["file"] else k.split(", ")[0] for k, v in kinds.items()]
    missed = [text for text, kind in zip(missed, kinds, strict=True) if kind not in known]
    missed += [f"{len(part)} of the {name} set's" for name, part in later.items() if part]
    *first, last = (f"{n['found']} of {n['scripts']} ({n['recall']:.0%})" for n in blind.values())
    wrong, right = (sum(n[name] for n in blind.values()) for name in ("wrong", "right"))
    unseen = "; ".join(kind.split(", ")[0] for kind in blind["seventh"]["missed"])
    return (
        "In scripts its rules were not written for, it finds about half of the mistakes: "
        f"{', '.join(first)} and {last} in seven sets, each scored before its misses were cured; the authors of the "
        "last five had seen no rule. The fifth was scored behind the changes for the fourth, the seventh "
        f"({blind['seventh']['before']['found']} before) behind those for the sixth, by their author. "
        f"{wrong} of {wrong + right} findings {'was' if wrong == 1 else 'were'} wrong. The last missed: {unseen}.\n\n"
        f"Today it finds the mistake in {shares['both']} scripts, in {shares['held out']} of those "
        f"held out. {both['wrong']} of {both['right'] + both['wrong']} findings are wrong. "
        f"Missed: {'; '.join(missed) or 'none of these kinds'}."
    )


def _of(share: dict[str, Any]) -> str:
    return f"{share['true']} of {share['findings']} ({share['share']:.0%})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
