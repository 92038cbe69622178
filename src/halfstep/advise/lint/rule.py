"""A rule of the linter and what it finds, plain values; and every rule by its code, from ``rules.toml``.

Static rules read a script's syntax tree (`static`), traced rules one traced step of a task (`tracing`). Text, JSON,
SARIF, ``--explain`` and docs are made from them.
"""

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from halfstep.errors import LintError, did_you_mean
from halfstep.mistakes import MISTAKES, Mistake
from halfstep.schema import packaged_toml

SEVERITIES = ("error", "warning", "note")
"""From the worst: raises or trains wrongly; loses precision or time, or fails for some data; worth knowing."""

COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LintFinding:
    """One mistake, at one place.

    Attributes:
        code: code of the rule, such as "HS012".
        severity: "error", "warning" or "note".
        file: path of the file as it was given; "" if no file is known.
        line: number of the line from 1; 0 if it is not known.
        what: what was found there, with the names of the script or model.
        why: what it does to training.
        fix: what to write instead.
    """

    code: str
    severity: str
    file: str
    line: int
    what: str
    why: str
    fix: str

    @property
    def place(self) -> str:
        """``file:line``, as far as it is known."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def record(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return dataclasses.asdict(self)


def lines(found: Sequence[LintFinding]) -> Iterator[tuple[str, str]]:
    """Yield the lines that a command prints, each with its style; why and fix stand with the first of a rule."""
    explained: set[tuple[str, str]] = set()
    for finding in found:
        place = f"{finding.place}: " if finding.file else ""
        yield f"{place}{finding.severity} {finding.code}: {finding.what}", COLOURS[finding.severity]
        if (finding.code, finding.fix) not in explained:
            explained.add((finding.code, finding.fix))
            yield f"    why: {finding.why}", ""
            yield f"    fix: {finding.fix}", ""
    if not found:
        yield "nothing found", "green"
        return
    counts = Counter(finding.severity for finding in found)
    words = [f"{counts[s]} {s}{'s' * (counts[s] > 1)}" for s in SEVERITIES if counts[s]]
    yield "", ""
    yield f"{', '.join(words)}; `halfstep lint --explain {found[0].code}` shows an example", "bold"


def exit_code(found: Sequence[LintFinding], severity: str) -> int:
    """Return 1 if there is a finding of at least a severity, else 0."""
    return int(any(f.severity in SEVERITIES[: SEVERITIES.index(severity) + 1] for f in found))


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule's check yields: a place, and what was found there."""

    line: int  # from 1; 0 if it is not known
    what: str
    file: str = ""  # "" for the file that was checked


Check = Callable[[Any], Iterable[Hit]]
"""Yields the hits in a `static.script.Script`; of a traced rule, in a `tracing.trace.Trace`."""

CHECKS: dict[str, Check] = {}
"""Code of a rule -> its check, which a decorator puts here when the rule's module is imported."""


def check_of(code: str) -> Callable[[Check], Check]:
    """Make the decorated function the check of the rule `code`."""
    return lambda check: CHECKS.setdefault(code, check)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Mistake):
    """One kind of mistake that the linter finds; from HS101 on by a traced step."""

    bad: str  # a script with the mistake; of a traced rule, a file whose function `task` returns the hs.Task
    good: str  # the same without it
    under: str = "mixed"  # of a traced rule, the policy under which `bad` has the mistake

    @property
    def traced(self) -> bool:
        """Whether the rule looks at a traced step, not at source."""
        return self.code >= "HS100"

    @property
    def check(self) -> Check:
        """What finds it; a script that was parsed has no mistake HS000, and `run.py` reports the others."""
        return CHECKS.get(self.code, lambda script: ())

    def finding(self, hit: Hit, file: str = "") -> LintFinding:
        """Return `hit` as a finding of this rule; `file` is that of a hit without one."""
        words = {"code": self.code, "severity": self.severity, "why": self.why, "fix": self.fix}
        return LintFinding(file=hit.file or file, line=hit.line, what=hit.what, **words)

    def text(self) -> str:
        """Return the rule in full, for ``--explain``."""
        traced = f"one traced step of a task; in the example, under the policy {self.under}"
        how = traced if self.traced else "the source"
        bad, good = ("\n".join(f"    {line}" for line in part.strip().splitlines()) for part in (self.bad, self.good))
        return (
            f"{self.code} ({self.severity}): {self.title}\n\nWhy: {self.why}\nFix: {self.fix}\nFound in {how}. Silence "
            f"one line with `# halfstep: ignore[{self.code}]`.\n\nBad:\n\n{bad}\n\nGood:\n\n{good}"
        )


RIGHT = ("FORWARD", "SCALED", "STEP", "UPDATE", "ZERO")
DATA = packaged_toml("advise/lint/rules.toml")
WORDS = packaged_toml("advise/lint/words.toml")
PATTERNS = {name: re.compile(text) for name, text in WORDS["patterns"].items()}


def loop(lines: Sequence[str] = RIGHT, *, before: str = "scaler = torch.amp.GradScaler()", after: str = "") -> str:
    """Return a script with a training loop of these lines; ``[lines]`` in ``rules.toml`` has names of some."""
    body = textwrap.indent("\n".join(DATA["lines"].get(line, line).strip() for line in lines), " " * 4)
    head = "for i, (x, y) in enumerate(loader):" if "i + 1" in body else "for x, y in loader:"
    return "\n".join(["import torch", "", *before.strip().splitlines(), head, body, after]).rstrip()


def task(**changed: str) -> str:
    """Return a file whose function `task` returns a task, with changed parts of ``[task]`` in ``rules.toml``."""
    parts = DATA["task"] | changed
    parts["init"] = textwrap.indent(f"self.body = nn.Linear(16, 16)\n{parts['init']}".strip(), " " * 8)
    parts["forward"] = textwrap.indent(parts["forward"].strip(), " " * 8)
    parts["before"] = f"\n{parts['before'].strip()}\n" if parts["before"] else ""
    made: str = parts["file"].format(**parts)
    return made if "F." in made else made.replace("import torch.nn.functional as F\n", "")


def _example(code: str, given: str | dict[str, Any], bad: str = "") -> str:
    """Return an example in full: the head of ``rules.toml`` says how it is written."""
    if isinstance(given, str):
        return given
    parts = dict(given)
    replaced, of = parts.pop("replace", ()), parts.pop("of", "")
    if of or (replaced and not parts):
        text: str = DATA["scripts"][of] if of else bad
    elif code >= "HS100":
        text = task(**parts)
    else:
        text = loop(parts.pop("loop", RIGHT), **parts)
    for old, new in replaced:
        text = text.replace(old, new)
    return text


def _rules() -> Iterator[Rule]:
    for code in sorted(code for code in DATA if code.startswith("HS")):
        given = {"good": {}} | DATA[code]
        if code in MISTAKES:
            given |= dataclasses.asdict(MISTAKES[code])
        bad = _example(code, given["bad"])
        yield Rule(**given | {"code": code, "bad": bad, "good": _example(code, given["good"], bad)})


RULES: Mapping[str, Rule] = MappingProxyType({rule.code: rule for rule in _rules()})
"""Code -> rule, in the order of codes; static rules (HS001 on), then traced ones (HS101 on)."""


def rule_of(code: str) -> Rule:
    """Return the rule called `code`, in letters of any case."""
    if code.upper() not in RULES:
        first, *_, last = RULES
        raise LintError(f"unknown rule {code!r}{did_you_mean(code.upper(), RULES)}; there are {first} to {last}")
    return RULES[code.upper()]


def explained(code: str) -> str:
    """Return the rule `code` in full; of a mistake that only a run shows, what the catalogue has of it."""
    mistake = MISTAKES.get(code.upper())
    if mistake is None or mistake.code in RULES:
        return rule_of(code).text()
    return (
        f"{mistake.code} ({mistake.severity}): {mistake.title}\n\nWhy: {mistake.why}\nFix: {mistake.fix}\n"
        "Found while a loop runs, by hs.BlackBox or hs.GradScaler."
    )
