"""``halfstep lint``: mistakes of mixed precision in scripts and tasks, before they run."""

from pathlib import Path

import halfstep as hs
from halfstep.advise.lint import RULES, SEVERITIES, explained
from halfstep.advise.lint.rule import exit_code, lines
from halfstep.advise.lint.run import POLICY, is_source
from halfstep.cli.options import split
from halfstep.cli.terminal import Files, console, record, say
from halfstep.errors import LintError, did_you_mean
from halfstep.report import sarif_log, strict_json


def carry_out(
    targets: list[str] | None, policy: str, severity: str, ignore: str, explain: str, json: Path | None,
    sarif: Path | None,
) -> int:  # fmt: skip
    """Run the command; return its exit code."""
    out = console()
    if explain:
        say(out, explained(explain))
        return 0
    if not targets:
        raise LintError("no target; give a .py file, a folder or path/to/file.py:function, or --explain HS001")
    if severity not in SEVERITIES:
        expected = ", ".join(SEVERITIES)
        raise LintError(f"--severity {severity!r}{did_you_mean(severity, SEVERITIES)}; expected {expected}")
    files = Files(json=json, sarif=sarif)
    chosen: str | hs.Policy = policy
    if policy != POLICY or not all(map(is_source, targets)):
        from halfstep.tasks.candidates import policy_named

        chosen = policy_named(policy, "cpu")
    left_out = split(ignore)
    found = [finding for target in targets for finding in hs.lint(target, policy=chosen, ignore=left_out)]
    for text, style in lines(found):
        say(out, text, style=style or None)
    titles = {code: rule.title for code, rule in RULES.items()}
    results = ((f.code, f.severity, f"{f.what}\n{f.why} {f.fix}", f.file, f.line) for f in found)
    shown = sarif_log(titles, "halfstep lint --explain {}", results)
    files.write(out, json=record(findings=found), sarif=lambda path: strict_json(shown, path))
    return exit_code(found, severity)
