"""Calibration: what one audit measured of a policy, reduced to what a search needs, as plain values.

A `Spot` is an operator in a module, forward and backward together; a `Remedy` is a change that a finding of the audit
asks for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import halfstep as hs

__all__ = ["Calibration", "Remedy", "Spot", "applied", "calibration_of", "differences", "sensitivity"]

RULED = ("ops", "modules")
"""Fields of a policy that are lists of rules."""

FORWARD = ("activation", "activation gradient")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """One operator in one module, over the audited steps.

    Attributes:
        module: dotted name, "" for the root.
        kind: name of the module's class.
        op: operator.
        rule: the policy's rule for it, "" for none.
        format: of its result.
        error: its largest local error, forward or backward: what this operator alone loses; 0.0 if nothing.
        headroom: bits below the largest number of the format; inf if unknown.
        overflows: whether it makes inf or nan where a wide format does not.
        time: share of the time of all operators.
        cast_bytes: bytes that the casts of its arguments write in a step.
        bytes: of its results in a step.
    """

    module: str
    kind: str
    op: str
    rule: str
    format: str
    error: float
    headroom: float
    overflows: bool
    time: float
    cast_bytes: int
    bytes: int

    @property
    def facts(self) -> str:
        """``local error 2e-3, 0.4 bits of headroom``."""
        words = ["overflows" if self.overflows else f"local error {self.error:.1g}"]
        if math.isfinite(self.headroom) and self.headroom < 8.0:  # more bits than that are no matter
            words.append(f"{self.headroom:.1f} bits of headroom")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change of the policy that a finding asks for."""

    field: str  # of the policy
    pattern: str  # the operator or module, where the field has rules
    value: str | float  # the rule, or the field's value
    why: str  # the finding: kind, place and numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What an audit of a policy measured.

    Attributes:
        spots: operators in the order in which they ran first.
        remedies: of the findings, the gravest first.
        steps: that were audited.
        failed: the error that ended the audit, "" for none.
    """

    spots: tuple[Spot, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    steps: int = 0
    failed: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Calibration:
        """Return what `dataclasses.asdict` made plain."""
        spots = tuple(Spot(**spot) for spot in values["spots"])
        remedies = tuple(Remedy(**remedy) for remedy in values["remedies"])
        return cls(**{**values, "spots": spots, "remedies": remedies})

    def covered(self, field: str, pattern: str) -> list[Spot]:
        """Return the spots that a rule of ``ops`` or ``modules`` with this pattern concerns."""
        if field == "ops":
            return [spot for spot in self.spots if spot.op == pattern]
        kind = pattern.removeprefix("class:")
        places = {s.module for s in self.spots if s.kind == kind and s.module} if kind != pattern else {pattern}
        return [spot for spot in self.spots if any(_within(spot.module, place) for place in places)]

    def facts(self, field: str, pattern: str) -> str:
        """Return the numbers of the most sensitive spot that a rule concerns, with a semicolon; "" for a field."""
        spots = self.covered(field, pattern) if pattern else []
        return f"{max(spots, key=sensitivity).facts}; " if spots else ""


def sensitivity(spot: Spot) -> tuple[bool, float, float]:
    """Return what spots are compared by: overflow, then error, then the lack of headroom."""
    return spot.overflows, spot.error, -spot.headroom


def _within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def calibration_of(audit: hs.lens.Audit) -> Calibration:
    """Return what a search needs of an audit."""
    kinds = {module.path: module.kind for module in audit.plan.modules}
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in audit.rows:
        if row.role in FORWARD:
            groups.setdefault((row.module, row.op), []).append(row)
    spots = tuple(_spot(module, kinds.get(module, ""), op, rows) for (module, op), rows in groups.items())
    remedies: dict[tuple[str, str], Remedy] = {}
    for finding in audit.findings():
        if finding.policy is not None:
            for field, pattern, value in differences(audit.policy, finding.policy):
                facts = next(
                    (s.facts for s in spots if (s.module, s.op) == (finding.module, finding.op)), finding.cause
                )
                why = f"{finding.kind} in {finding.place}: {facts}"
                remedies.setdefault((field, pattern), Remedy(field=field, pattern=pattern, value=value, why=why))
    return Calibration(spots=spots, remedies=tuple(remedies.values()), steps=audit.steps)


def _spot(module: str, kind: str, op: str, rows: list[Any]) -> Spot:
    forward = next((row for row in rows if row.role == "activation"), rows[0])
    return Spot(
        module=module, kind=kind, op=op, rule=forward.rule, format=forward.format,
        error=max((row.error for row in rows if not math.isnan(row.error)), default=0.0),
        headroom=min((row.headroom for row in rows if not math.isnan(row.headroom)), default=math.inf),
        overflows=any(row.overflow > 0 for row in rows), time=sum(row.time for row in rows),
        cast_bytes=sum(row.cast_bytes for row in rows), bytes=forward.bytes,
    )  # fmt: skip


def differences(base: hs.Policy, other: hs.Policy) -> list[tuple[str, str, str | float]]:
    """Return (field, pattern, value) for what `other` has and `base` has not; fields that no change can hold excepted.

    Rules are those appended in `other`.
    """
    found: list[tuple[str, str, str | float]] = []
    for field in dataclasses.fields(hs.Policy):
        mine, theirs = getattr(base, field.name), getattr(other, field.name)
        if field.name in RULED:
            found += [(field.name, pattern, rule) for pattern, rule in theirs if (pattern, rule) not in mine]
        elif mine != theirs and field.name != "name" and isinstance(theirs, (str, float)):
            found.append((field.name, "", theirs))
    return found


def applied(policy: hs.Policy, changes: Iterable[tuple[str, str, str | float]]) -> hs.Policy:
    """Return `policy` with (field, pattern, value) made, one after the other."""
    for field, pattern, value in changes:
        if field in RULED:
            value = (*getattr(policy, field), (pattern, str(value)))  # type: ignore[assignment]
        policy = policy.replace(**{field: value})
    return policy
