"""lint: a file, a folder, a task or a task's function in, findings out."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import halfstep as hs
from halfstep.advise.lint.rule import RULES, Hit, LintFinding, rule_of
from halfstep.advise.lint.static import models, scaling, values  # noqa: F401
from halfstep.advise.lint.static.script import Script
from halfstep.arguments import PATH, TEXT, Kind, check, listed
from halfstep.errors import LintError

if TYPE_CHECKING:
    from halfstep.policy import Policy
    from halfstep.tasks import Task

POLICY = "mixed"  # what a task is traced under, unless it is told
IGNORE = re.compile(r"#\s*halfstep:\s*ignore\[([A-Za-z0-9, ]+)\]")
FUNCTION = re.compile(r"(.*\.py):[^\W\d]\w*", re.DOTALL)  # the target that is a function of a file
LEFT_OUT = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"})
"""Folders below a target that hold other people's code; those whose name begins with a dot are left out too."""


def lint(
    target: str | Path | Task, *, policy: Policy | str | Path = POLICY, ignore: Iterable[str] = ()
) -> list[LintFinding]:
    """Find mistakes of mixed precision before a run.

    Args:
        target: a Python file or a folder of them, which are read and not run; ``path/to/file.py:function``, whose file
            is read and whose `hs.Task` is traced for one step; an `hs.Task`, or the name of one of halfstep's.
        policy: what a task is traced under.
        ignore: codes of rules to leave out.

    Returns:
        The findings, by file and line; paths below the current folder are relative to it. A line's
        ``# halfstep: ignore[HS012]`` takes out its findings of that rule.

    Raises:
        LintError: no such file or folder, a file that is no Python, or an unknown code.
        TaskError: the function does not exist, raises, or returns no hs.Task.
        PolicyError: no such policy.

    Examples:
        >>> hs.lint(task, policy=hs.Policy.of("mixed", dtype="bf16"))
        []
    """
    targets = PATH | Kind("an hs.Task", lambda one: isinstance(one, hs.Task))
    check("hs.lint", LintError, target=(target, targets), ignore=(ignore, listed(TEXT, "a list of codes of rules")))
    left_out = {rule_of(code).code for code in ignore}
    if policy != POLICY:
        policy = hs.Policy.of(policy)
    if is_source(target):
        files = _python_files(Path(target))
        found = [finding for file in files for finding in _in_file(file, among=len(files))]
    else:
        from halfstep.advise.lint.tracing.rules import check_task, task_of

        traced = task_of(target)
        script = FUNCTION.fullmatch(str(target))
        found = [*(_in_file(Path(script[1])) if script else ()), *check_task(traced, hs.Policy.of(policy))]
    kept = [_relative(f) for f in found if f.code not in left_out and not _ignored(f)]
    return sorted(dict.fromkeys(kept), key=lambda f: (f.file, f.line, f.code))


def is_source(target: str | Path | Task) -> TypeGuard[str | Path]:
    """Return whether a target is a file or a folder: it is read without torch, and under no policy."""
    return isinstance(target, (str, os.PathLike)) and Path(target).exists()


def _python_files(path: Path) -> list[Path]:
    if path.is_dir():
        below = {file: file.relative_to(path).parts[:-1] for file in path.rglob("*.py")}
        files = sorted(f for f in below if not any(p in LEFT_OUT or p.startswith(".") for p in below[f]))
        if not files:
            raise LintError(f"folder {str(path)!r} holds no Python files")
        return files
    if path.suffix == ".ipynb":
        raise LintError(f"{str(path)!r} is a notebook; `jupyter nbconvert --to script {path}` makes a .py file of it")
    if path.suffix not in (".py", ".pyi"):
        raise LintError(f"{str(path)!r} is no Python file; expected a .py file, a folder or path/to/file.py:function")
    return [path]


def _in_file(path: Path, among: int = 1) -> Iterator[LintFinding]:
    """Yield what the static rules find in a file; a file among others that cannot be parsed is a finding itself."""
    try:
        script = Script.read(path)
        hits = [(rule, hit) for rule in RULES.values() if not rule.traced for hit in rule.check(script)]
    except (LintError, RecursionError) as error:
        reason = LintError(f"{path} is nested too deeply") if isinstance(error, RecursionError) else error
        if among == 1:
            raise reason from error
        hits = [(RULES["HS000"], Hit(0, str(reason)))]
    yield from (rule.finding(hit, str(path)) for rule, hit in hits)


def _relative(finding: LintFinding) -> LintFinding:
    path = Path(finding.file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return dataclasses.replace(finding, file=str(path.relative_to(Path.cwd())))
    return finding


def _ignored(finding: LintFinding) -> bool:
    path = Path(finding.file)
    if not finding.line or not path.is_file():
        return False
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    match = IGNORE.search(lines[finding.line - 1]) if finding.line <= len(lines) else None
    return match is not None and finding.code in {code.strip().upper() for code in match.group(1).split(",")}
