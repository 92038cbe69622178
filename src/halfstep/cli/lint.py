"""``halfstep lint``: mistakes of mixed precision in scripts and tasks, before they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import halfstep as hs
from halfstep.advise.lint import RULES, SEVERITIES, LintFinding, rule_of
from halfstep.cli.audit import policy_of
from halfstep.cli.terminal import command_line, complain, console, say, writable, write_json
from halfstep.errors import HalfstepError, LintError, did_you_mean
from halfstep.report import SarifResult, sarif_log, strict_json

__all__ = ["run_lint"]

FOUND = 1
"""Exit code for findings that are severe enough."""

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def run_lint(
    targets: Sequence[str], *, policy: str, severity: str, ignore: Sequence[str], explain: str,
    json_path: Path | None, sarif_path: Path | None,
) -> int:  # fmt: skip
    """Run the command, whose options the arguments are.

    Returns:
        The exit code: 0, 1 for a finding of at least `severity`, 2 for bad input.
    """
    out = console()
    try:
        if explain:
            say(out, rule_of(explain).text())
            return 0
        if not targets:
            raise LintError("no target; give a .py file, a folder or path/to/file.py:function, or --explain HS001")
        if severity not in SEVERITIES:
            words = f"expected {', '.join(SEVERITIES)}"
            raise LintError(f"--severity {severity!r}{did_you_mean(severity, SEVERITIES)}; {words}")
        writable(json_path)
        writable(sarif_path, "--sarif")
        chosen = policy_of(policy, "cpu")
        found = [finding for target in targets for finding in hs.lint(target, policy=chosen, ignore=ignore)]
    except HalfstepError as error:
        return complain(error)
    _print(out, found)
    command = command_line("lint", *targets, policy=policy, ignore=",".join(ignore))
    records = [finding.record() for finding in found]
    write_json(out, json_path, {"command": command, "halfstep": hs.__version__, "findings": records})
    if sarif_path is not None:
        sarif_path.write_text(strict_json(_sarif(found)), encoding="utf-8")
        say(out, f"written: {sarif_path}")
    severe = SEVERITIES[: SEVERITIES.index(severity) + 1]
    return FOUND if any(finding.severity in severe for finding in found) else 0


def _print(out: Console, found: Sequence[LintFinding]) -> None:
    """Print each finding; why and fix stand with the first of a rule."""
    explained: set[tuple[str, str]] = set()
    for finding in found:
        place = f"{finding.place}: " if finding.file else ""
        say(out, f"{place}{finding.severity} {finding.code}: {finding.what}", style=COLOURS[finding.severity])
        if (finding.code, finding.fix) not in explained:
            explained.add((finding.code, finding.fix))
            say(out, f"    why: {finding.why}")
            say(out, f"    fix: {finding.fix}")
    if not found:
        say(out, "nothing found", style="green")
        return
    counts = Counter(finding.severity for finding in found)
    words = [f"{counts[s]} {s}{'s' * (counts[s] > 1)}" for s in SEVERITIES if counts[s]]
    say(out)
    say(out, f"{', '.join(words)}; `halfstep lint --explain {found[0].code}` shows an example", style="bold")


def _sarif(found: Sequence[LintFinding]) -> dict[str, Any]:
    rules = {code: rule.title for code, rule in RULES.items()}
    results = [
        SarifResult(
            rule=finding.code, level=finding.severity, text=f"{finding.what}\n{finding.why} {finding.fix}",
            file=finding.file, line=finding.line,
        )
        for finding in found
    ]  # fmt: skip
    return sarif_log(rules, "halfstep lint --explain {}", results)
