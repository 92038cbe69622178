"""Calibration: what one audit measured of a policy, as plain values, and the changes of it that are worth a try.

Nothing here is measured again: a race tells what a change is worth.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import halfstep as hs
from halfstep.advise.tune.result import Change
from halfstep.formats import FORMATS

RULED = ("ops", "modules")  # fields of a policy that are lists of rules

FORWARD = ("activation", "activation gradient")

LOW_BITS = 32  # a format with fewer bits rounds what fp32 keeps

FIELDS: Mapping[str, tuple[str, ...]] = {
    "residual": ("low", "fp32"),
    "params": ("low",),
    "norms": ("low", "fp32"),
    "master": ("master", "stochastic", "kahan"),  # "auto" is split in bf16, master in fp16
    "inputs": ("low", "keep"),
    "state": ("low",),
    "grads": ("param",),
}
"""Fields of a policy that cost time or memory, and the values to try."""

BEHIND_LOW = ("norms", "master", "grads")
"""Fields that do nothing under ``params="fp32"``."""

MOST = 16  # changes that are tried at once
NAMED = 6  # modules that are tried one by one, the most expensive ones

MINOR = 0.05
"""Where only time counts, fields rank as rules for so much of the time: presets have shown most of what they do."""

COUNTS = 0.01  # share of the time of all operators below which an operator or module is not worth a rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """One operator in one module, over the audited steps."""

    module: str  # dotted name, "" for the root
    kind: str  # name of the module's class
    op: str
    format: str  # of its result
    error: float  # its largest local error, forward or backward: what this operator alone loses; 0.0 if nothing
    headroom: float  # bits below the largest number of the format; inf if unknown
    overflows: bool  # whether it makes inf or nan where a wide format does not
    time: float  # share of the time of all operators
    cast_bytes: int  # bytes that the casts of its arguments write in a step
    bytes: int  # of its results in a step

    @property
    def facts(self) -> str:
        """``local error 2e-3, 0.4 bits of headroom``."""
        words = ["overflows" if self.overflows else f"local error {self.error:.1g}"]
        if math.isfinite(self.headroom) and self.headroom < 8.0:  # more bits than that are no matter
            words.append(f"{self.headroom:.1f} bits of headroom")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What an audit of a policy measured."""

    spots: tuple[Spot, ...] = ()  # operators in the order in which they ran first
    remedies: tuple[Change, ...] = ()  # what the findings ask for, the gravest first
    failed: str = ""  # the error that ended the audit, "" for none

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Calibration:
        """Return what `dataclasses.asdict` made plain."""
        spots = tuple(Spot(**spot) for spot in values["spots"])
        remedies = tuple(Change(**remedy) for remedy in values["remedies"])
        return cls(**{**values, "spots": spots, "remedies": remedies})

    def places(self, modules: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield what a rule can be for, (field, pattern): operators, classes of modules, and these modules."""
        known = set(hs.policy.operator_names("*")) - {"to"}
        yield from (("ops", op) for op in dict.fromkeys(spot.op for spot in self.spots) if op in known)
        yield from (("modules", f"class:{kind}") for kind in dict.fromkeys(s.kind for s in self.spots if s.module))
        yield from (("modules", module) for module in dict.fromkeys(modules))

    def covered(self, field: str, pattern: str) -> list[Spot]:
        """Return the spots that a rule of ``ops`` or ``modules`` with this pattern concerns."""
        if field == "ops":
            return [spot for spot in self.spots if spot.op == pattern]
        kind = pattern.removeprefix("class:")
        places = {s.module for s in self.spots if s.kind == kind and s.module} if kind != pattern else {pattern}
        return [spot for spot in self.spots if any(f"{spot.module}.".startswith(f"{place}.") for place in places)]

    def facts(self, field: str, pattern: str) -> str:
        """Return the numbers of the most sensitive spot that a rule concerns, with a semicolon; "" for a field."""
        spots = self.covered(field, pattern) if pattern else []
        return f"{max(spots, key=sensitivity).facts}; " if spots else ""


def sensitivity(spot: Spot) -> tuple[bool, float, float]:
    """Return what spots are compared by: overflow, then error, then the lack of headroom."""
    return spot.overflows, spot.error, -spot.headroom


def calibration_of(audit: hs.lens.Audit) -> Calibration:
    """Return what a search needs of an audit."""
    kinds = {module.path: module.kind for module in audit.plan.modules}
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in audit.rows:
        if row.role in FORWARD:
            groups.setdefault((row.module, row.op), []).append(row)
    spots = []
    for (module, op), rows in groups.items():
        forward = next((row for row in rows if row.role == "activation"), rows[0])
        spots.append(
            Spot(
                module=module, kind=kinds.get(module, ""), op=op, format=forward.format,
                error=max((row.error for row in rows if not math.isnan(row.error)), default=0.0),
                headroom=min((row.headroom for row in rows if not math.isnan(row.headroom)), default=math.inf),
                overflows=any(row.overflow > 0 for row in rows), time=sum(row.time for row in rows),
                cast_bytes=sum(row.cast_bytes for row in rows), bytes=forward.bytes,
            )
        )  # fmt: skip
    remedies: dict[tuple[str, str], Change] = {}
    for finding in audit.findings():
        if finding.policy is not None:
            facts = next((s.facts for s in spots if (s.module, s.op) == (finding.module, finding.op)), finding.cause)
            for change in differences(audit.policy, finding.policy, f"{finding.kind} in {finding.place}: {facts}"):
                remedies.setdefault((change.field, change.pattern), change)
    return Calibration(spots=tuple(spots), remedies=tuple(remedies.values()))


def differences(base: hs.Policy, other: hs.Policy, why: str = "") -> list[Change]:
    """Return what `other` has and `base` has not, without what no change can hold; rules are those appended."""
    found: list[Change] = []
    for name in (field.name for field in dataclasses.fields(hs.Policy)):
        mine, theirs = getattr(base, name), getattr(other, name)
        if name in RULED:
            new = [(pattern, rule) for pattern, rule in theirs if (pattern, rule) not in mine]
            found += [Change(field=name, pattern=pattern, value=rule, why=why) for pattern, rule in new]
        elif mine != theirs and name != "name" and isinstance(theirs, (str, float)):
            found.append(Change(field=name, value=theirs, why=why))
    return found


def applied(policy: hs.Policy, changes: Iterable[Change]) -> hs.Policy:
    """Return `policy` with the changes made, one after the other."""
    for change in changes:
        value: Any = change.value
        if change.field in RULED:
            value = (*getattr(policy, change.field), (change.pattern, str(value)))
        policy = policy.replace(**{change.field: value})
    return policy


# ------------------------------------------------------------------ changes that are worth a try


def exceptions(calibration: Calibration, policy: hs.Policy) -> list[Change]:
    """Return changes that bring the error down: the audit's own remedies, then the operators that lose most."""
    found = list(calibration.remedies)
    taken, known = {(r.field, r.pattern) for r in found}, set(hs.policy.operator_names("*"))
    lossy = (spot for spot in calibration.spots if (spot.overflows or spot.error > 0.0) and _is_low(spot))
    for spot in sorted(lossy, key=lambda s: (s.overflows, s.error), reverse=True):
        field, pattern = ("modules", spot.module) if spot.module else ("ops", spot.op)
        if (field, pattern) not in taken and (spot.module or spot.op in known):
            taken.add((field, pattern))
            found.append(Change(field=field, pattern=pattern, value="fp32", why=spot.facts))
    return [change for change in found if applied(policy, [change]) != policy]


def savings(calibration: Calibration, policy: hs.Policy, *, memory: bool = False) -> list[Change]:
    """Return changes that may save time or memory, at most `MOST`, those first that concern most of the time."""
    share = 1.0 if memory else MINOR  # where memory counts, fields come first, which decide it
    found: list[tuple[float, Change]] = []
    for field, values in FIELDS.items():
        why = f"{field} was {getattr(policy, field)}"
        if policy.params == "low" or field not in BEHIND_LOW:
            new = [value for value in values if policy.dtype != "fp16" or (field, value) != ("master", "master")]
            found += [(share, Change(field=field, value=value, why=why)) for value in new]
    found = sorted([*found, *_rules(calibration)], key=lambda pair: pair[0], reverse=True)
    chosen: dict[object, Change] = {}
    for _, change in found:
        if applied(policy, [change]) != policy:
            spots = calibration.covered(change.field, change.pattern) if change.pattern else [change.field]
            # a class with one operator is tried once, by the operator
            chosen.setdefault((frozenset(spots), change.value), change)
    return list(chosen.values())[:MOST]


def _rules(calibration: Calibration) -> Iterator[tuple[float, Change]]:
    """Yield (share of the time concerned, rule)."""
    modules: dict[str, float] = {}
    for spot in calibration.spots:
        if spot.module and spot.op != "to":
            modules[spot.module] = modules.get(spot.module, 0.0) + spot.time
    named = sorted(modules, key=modules.__getitem__, reverse=True)[:NAMED]
    for field, pattern in calibration.places(named):
        concerned = [spot for spot in calibration.covered(field, pattern) if spot.op != "to"]
        share = sum(spot.time for spot in concerned)
        if share < COUNTS:
            continue
        worst = max(concerned, key=sensitivity)
        values = ["keep", "low"]  # rules that these operators do not have: out of fp32, or back into it
        if any(map(_is_low, concerned)):
            values = ["keep", "fp32"] if any(spot.cast_bytes for spot in concerned) else ["fp32"]
        for value in values:
            yield share, Change(field=field, pattern=pattern, value=value, why=worst.facts)


def _is_low(spot: Spot) -> bool:
    return spot.format in FORMATS and FORMATS[spot.format].bits < LOW_BITS
