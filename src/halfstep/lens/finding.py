"""Finding: one thing that is wrong with a run's numbers, in one vocabulary for the audit and for Monitor."""

from dataclasses import dataclass
from typing import Any

from halfstep.policy.policy import Policy
from halfstep.report import plain
from halfstep.schema import packaged_toml

KINDS: dict[str, str] = packaged_toml("lens/kinds.toml")["findings"]
"""Kind of a finding -> what it means, the gravest first."""

ROOM = 0.5
"""Bits below the largest number of a format that are a risk. From a few steps to a long run the largest of many numbers
that do not drift grows by a third, as that of normal numbers does from 4.5 to 6 standard deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        op: operator, public short name; the optimizer's class for updates, "Adam.exp_avg_sq" for a state; "" where
            Monitor samples a module as a whole.
        also: more places with the same finding, the worst first; Monitor has one finding of each kind.
    """

    kind: str  # one of `KINDS`
    role: str  # what the numbers are: loss, activation, activation gradient, weight, weight gradient, update or state
    module: str = ""  # dotted name of the module, "" for the root
    op: str = ""
    parameter: str = ""  # dotted name of the parameter or buffer, or ""
    line: str = ""  # the user's line, "file.py:12 source text"
    step: int = 0  # updates made when Monitor saw it first; 0 in an audit
    severity: float  # from 0 to 1: how much is lost
    cause: str  # what happens in this place, with its numbers
    remedy: str  # what to do, in words
    policy: Policy | None = None  # the audited policy with the remedy made, or None where no policy is the remedy
    diff: str = ""  # ``audited.diff(policy)``: what to change
    also: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it is, in a few words: the parameter, or the operator and its module."""
        if self.parameter:
            return f"{self.parameter} ({self.op})" if self.role == "state" and self.op else self.parameter
        if not self.op:
            return self.module or "the model"
        return f"{self.op} in {self.module}" if self.module else self.op

    @property
    def where(self) -> tuple[str, ...]:
        """All places, the worst first."""
        return (self.place, *self.also)

    def __str__(self) -> str:
        """Return the finding as text of a few lines."""
        more = f" and {len(self.also)} more" if self.also else ""
        at = f" at {self.line}" if self.line else ""
        when = f" (step {self.step})" if self.step else ""
        lines = [f"{self.kind}: {self.place}{more}{at}{when}", f"  {self.cause}", f"  remedy: {self.remedy}"]
        lines += [f"    {line}" for line in self.diff.splitlines()]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return plain values; the policy as TOML."""
        record: dict[str, Any] = plain(self)
        return record
