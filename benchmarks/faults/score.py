"""How a diagnosis is scored against the truth. Fixed before there was anything to score.

A verdict is any object with the fields of a Verdict (kind, op, module, phase, line, parameter, rank, cures); a finding
any object with cause, module, op, parameter. They are read by name, nothing of halfstep is imported here.

* Located: the verdict names the producer exactly, that is operator, module and source line; where no operator is to
  blame, kind and the bad parameter or buffer; among several processes the rank too. Nothing in between counts.
* Cured: at least one cure of the verdict is verified, where the truth has cures; where it has none, none is claimed.
* Flagged (list B): one finding has the right cause and points at the right module or parameter.
* False alarm (controls): a verdict or finding that calls for an action.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.case import Fault, marked_line

__all__ = ["HARMLESS", "Share", "alarmed", "curable", "cured_right", "flagged", "kind_right", "located"]

HARMLESS = frozenset({"", "scale_too_high", "not_reproducible"})
"""Kinds that accuse no operator: on a control they are no false alarm if the step was skipped at all."""

LINE = re.compile(r"([^/\\\s:]+\.py):(\d+)")
"""File and line number in "path/to/file.py:12 source text"."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many of how many.

    Attributes:
        right: entries judged right.
        wrong: names of the others.
    """

    right: int
    wrong: tuple[str, ...]

    @classmethod
    def of(cls, judged: Iterable[tuple[str, bool]]) -> Share:
        """Count (name, right) pairs."""
        pairs = list(judged)
        return cls(right=sum(ok for _, ok in pairs), wrong=tuple(name for name, ok in pairs if not ok))

    @property
    def value(self) -> float:
        """The share, 1.0 of nothing."""
        count = self.right + len(self.wrong)
        return self.right / count if count else 1.0


def located(verdict: Any, fault: Fault) -> bool:
    """Say whether a verdict on a fault of list A names the producer exactly."""
    truth = fault.truth
    if verdict is None or (truth.rank is not None and verdict.rank != truth.rank):
        return False
    if not truth.op:
        return verdict.kind == truth.kind and _parameter(verdict.parameter, fault)
    marked = marked_line(fault)
    found = LINE.search(verdict.line)
    return (
        verdict.op in (truth.op, *truth.also)
        and verdict.module in (truth.module, *truth.also)
        and verdict.phase == truth.phase
        and marked is not None
        and found is not None
        and (found[1], int(found[2])) == marked[:2]
    )


def kind_right(verdict: Any, fault: Fault) -> bool:
    """Say whether the kind is right; reported beside the score, since poles (1/0) are called either way."""
    return verdict is not None and bool(verdict.kind == fault.truth.kind)


def curable(fault: Fault) -> bool:
    """Say whether a change of the policy makes the step finite."""
    return bool(fault.truth.cures)


def cured_right(verdict: Any, fault: Fault) -> bool:
    """Say whether there is a verified cure where there can be one, and none where there cannot."""
    if verdict is None:
        return False
    return any(cure.verified for cure in verdict.cures) == curable(fault)


def flagged(findings: Iterable[Any], fault: Fault) -> bool:
    """Say whether a finding on a fault of list B has the right cause at the right place."""
    return any(f.cause == fault.truth.cause and _placed(f, fault) for f in findings)


def alarmed(verdicts: Iterable[Any], findings: Iterable[Any] = ()) -> bool:
    """Say whether a healthy program was accused: of anything but a scale on its way."""
    return any(v is not None and v.kind not in HARMLESS for v in verdicts) or any(True for _ in findings)


def _parameter(name: str, fault: Fault) -> bool:
    truth = fault.truth
    return not truth.parameter or name in (truth.parameter, *truth.also)


def _placed(finding: Any, fault: Fault) -> bool:
    truth = fault.truth
    if truth.parameter and finding.parameter:
        return _parameter(finding.parameter, fault)
    if truth.op and finding.op and finding.op not in (truth.op, *truth.also):
        return False
    return finding.module in (truth.module, *truth.also)
