"""``halfstep lint``: mistakes of mixed precision in scripts and tasks, before they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

import halfstep as hs
from halfstep.advise.lint import RULES, SEVERITIES, LintFinding, explained
from halfstep.cli import options
from halfstep.cli.options import Json, PolicyLabel, Sarif, split
from halfstep.cli.terminal import Files, command_line, console, record, say
from halfstep.errors import LintError, did_you_mean
from halfstep.report import SarifResult, counted, sarif_log, strict_json
from halfstep.tasks.candidates import policy_named

FOUND = 1
"""Exit code for findings that are severe enough."""

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def run_lint(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET",
            help="A .py file, a folder, path/to/file.py:function, which returns an hs.Task (its file is read, and one "
            "step of it traced), or lenet5, resnet, gpt.",
        ),
    ] = None,
    policy: PolicyLabel = "mixed",
    severity: Annotated[
        str,
        typer.Option(
            help="The least severity for exit code 1: note, warning or error.",
            autocompletion=options.among(lambda: SEVERITIES[::-1]),
        ),
    ] = "warning",
    ignore: Annotated[str, typer.Option(help="Codes of rules to leave out, with commas.")] = "",
    explain: Annotated[str, typer.Option(help="Show a rule with an example, such as HS001.")] = "",
    json: Json = None,
    sarif: Sarif = None,
) -> int:
    """Find mistakes of mixed precision in scripts and tasks, before they run.

    Scripts are read and not run. A line's comment `# halfstep: ignore[HS012]` silences that rule there.
    """
    out = console()
    if explain:
        say(out, explained(explain))
        return 0
    if not targets:
        raise LintError("no target; give a .py file, a folder or path/to/file.py:function, or --explain HS001")
    if severity not in SEVERITIES:
        words = f"expected {', '.join(SEVERITIES)}"
        raise LintError(f"--severity {severity!r}{did_you_mean(severity, SEVERITIES)}; {words}")
    files = Files(json=json, sarif=sarif)
    chosen, left_out = policy_named(policy, "cpu"), split(ignore)
    found = [finding for target in targets for finding in hs.lint(target, policy=chosen, ignore=left_out)]
    _print(out, found)
    again = command_line("lint", *targets, policy=policy, ignore=",".join(left_out))
    files.write(
        out,
        json=record(again, findings=[finding.record() for finding in found]),
        sarif=lambda path: path.write_text(strict_json(_sarif(found)), encoding="utf-8"),
    )
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
    words = [counted(counts[s], s) for s in SEVERITIES if counts[s]]
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
