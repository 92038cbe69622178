"""Run the linter over public training scripts and recompute the share of its findings that are true.

    python -m benchmarks.lint_scripts --repos FOLDER [--json benchmarks/results/lint.json] [--first]

FOLDER holds a clone of each repository of the report at FOLDER/owner/name (bare or not). Files are read with `git show`
at the commit of the report, so the clone's own branch does not matter. `--list` prints the commands that make them.
None of their code is in this repository: the report names repository, commit, path and line.

The scripts were chosen by popularity over kinds of training before a finding was seen. The findings in the set "first"
were read one by one; classes of rules with false ones were mended, and HS048 was written. Those in "second" and
"third" were read after that. The third set takes every file with a backward pass and autocast, GradScaler or half() of
12 more repositories, at most 20 of one. Every finding has a label: true if the code does what the finding describes and
the advice is right for it, else false, with the reason in a sentence. `--first` marks the findings of this run as those
before mending; what mended rules no longer find stays in the report for that share. A finding without a label counts as
false, and the command ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.stamp import stamped
from halfstep.advise.lint import RULES, lint

REPORT = Path(__file__).parent / "results" / "lint.json"
COMMAND = "python -m benchmarks.lint_scripts --repos FOLDER --json benchmarks/results/lint.json"

DEPRECATED = "HS026"
"""The rule on names of torch.cuda.amp."""

Key = tuple[str, str, int, str]
"""Repository, path, line, code of the rule."""


def key_of(finding: dict[str, Any]) -> Key:
    """Return what a finding is known by."""
    return finding["repository"], finding["path"], finding["line"], finding["code"]


def found_in(script: dict[str, Any], repos: Path) -> Iterator[dict[str, Any]]:
    """Yield what the static rules find in one script of the report."""
    clone = repos / script["repository"]
    shown = subprocess.run(
        ["git", "-C", str(clone), "show", f"{script['commit']}:{script['path']}"], capture_output=True, check=False
    )
    if shown.returncode:
        raise SystemExit(f"{clone}: {shown.stderr.decode().strip()}; see --list")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(script["path"]).name
        path.write_bytes(shown.stdout)
        for finding in lint(path):
            yield {
                "repository": script["repository"],
                "path": script["path"],
                "line": finding.line,
                "code": finding.code,
                "severity": finding.severity,
                "what": finding.what,
            }


def share(findings: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return how many findings there are and how many of them are true."""
    counted = list(findings)
    true = sum(finding["true"] is True for finding in counted)
    return {"findings": len(counted), "true": true, "share": round(true / len(counted), 4) if counted else None}


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return the shares of a report: of each set before and after mending, and by rule.

    Most findings are `DEPRECATED`, names that are easy to find and never wrong; so each share is also given without.
    """
    sets = {script["repository"]: script["set"] for script in report["scripts"]}
    now = [finding for finding in report["findings"] if finding["now"]]
    shares: dict[str, Any] = {}
    for name in (*dict.fromkeys(sets.values()), "all"):
        for when, mark in (("before mending", "first"), ("now", "now")):
            among = [f for f in report["findings"] if f[mark] and name in (sets[f["repository"]], "all")]
            if not among:
                continue
            rest = [finding for finding in among if finding["code"] != DEPRECATED]
            shares[f"{name}, {when}"] = share(among) | {f"without {DEPRECATED}": share(rest)}
    return {
        "scripts": len(report["scripts"]),
        "repositories": len(sets),
        "scripts with a finding": len({(f["repository"], f["path"]) for f in now}),
        **shares,
        "by rule": {code: share(f for f in now if f["code"] == code) for code in sorted({f["code"] for f in now})},
    }


def run(report: dict[str, Any], repos: Path, *, first: bool) -> list[dict[str, Any]]:
    """Lint every script, merge what is found into the report, and return the findings that have no label.

    Args:
        report: changed in place.
        repos: folder with the clones.
        first: whether the findings of this run are those before mending.
    """
    known = {key_of(finding): finding for finding in report["findings"]}
    for finding in known.values():
        finding["now"] = False
    for script in report["scripts"]:
        for finding in found_in(script, repos):
            entry = known.setdefault(key_of(finding), {**finding, "true": None, "reason": "", "first": False})
            entry |= {"severity": finding["severity"], "what": finding["what"], "now": True}
            entry["first"] = entry["first"] or first
    kept = [finding for finding in known.values() if finding["now"] or finding["first"]]
    report["findings"] = sorted(kept, key=key_of)
    report["rules"] = [code for code, rule in RULES.items() if not rule.traced]
    report["summary"] = summary(report)
    return [finding for finding in report["findings"] if finding["true"] is None]


def written(report: dict[str, Any]) -> str:
    """Return a report with one line for each script and finding."""
    parts = {}
    for name in ("scripts", "findings"):
        parts[name] = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in report[name]) + "\n ]"
    head = json.dumps({name: value for name, value in report.items() if name not in parts}, indent=1)
    return f'{head[:-2]},\n "scripts": {parts["scripts"]},\n "findings": {parts["findings"]}\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repos", type=Path, help="folder with the clones, FOLDER/owner/name")
    parser.add_argument("--json", type=Path, default=REPORT, help="the report that is read and written")
    parser.add_argument("--first", action="store_true", help="mark this run's findings as those before mending")
    parser.add_argument("--list", action="store_true", help="print the commands that clone the repositories")
    options = parser.parse_args()
    report = json.loads(options.json.read_text(encoding="utf-8"))
    if options.list or options.repos is None:
        for name in dict.fromkeys(script["repository"] for script in report["scripts"]):
            print(f"git clone --bare --filter=blob:none https://github.com/{name} FOLDER/{name}")
        return 0
    unlabelled = run(report, options.repos, first=options.first)
    options.json.write_text(written(stamped({**report, "commit": ""})), encoding="utf-8")
    print(json.dumps(report["summary"], indent=1))
    for finding in unlabelled:
        print(
            f"no label: {finding['repository']} {finding['path']}:{finding['line']} {finding['code']} {finding['what']}"
        )
    return 1 if unlabelled else 0


if __name__ == "__main__":
    sys.exit(main())
