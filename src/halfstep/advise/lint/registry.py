"""Every rule of the linter by its code: words and examples, from ``rules.toml``."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from halfstep.advise.lint.rule import Rule
from halfstep.errors import LintError, did_you_mean
from halfstep.mistakes import MISTAKES
from halfstep.schema import packaged_toml

RIGHT = ("FORWARD", "SCALED", "STEP", "UPDATE", "ZERO")

DATA = packaged_toml("advise/lint/rules.toml")


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
