"""Moves: the changes of a policy that are worth a try, from what an audit of it measured.

Two lists: what brings an error down (`exceptions`, the most sensitive first), and what may bring cost down (`savings`,
the most expensive first). Nothing here is measured again: a race tells what a change is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration, Remedy, Spot, applied, sensitivity
from halfstep.formats import FORMATS

__all__ = ["exceptions", "savings"]

LOW_BITS = 32
"""A format with fewer bits rounds what fp32 keeps."""

FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "residual": ("low", "fp32"),
        "params": ("low",),
        "norms": ("low", "fp32"),
        "master": ("master", "stochastic", "kahan"),  # "auto" is split in bf16, master in fp16
        "inputs": ("low", "keep"),
        "state": ("low",),
    }
)
"""Fields of a policy that cost time or memory, and the values to try."""

BEHIND_LOW = ("norms", "master")
"""Fields that do nothing under ``params="fp32"``."""

MOST = 16
"""Changes that are tried at once."""

NAMED = 6
"""Modules that are tried one by one, the most expensive ones."""

MINOR = 0.05
"""Where only time counts, fields rank as rules for so much of the time: presets have shown most of what they do."""

COUNTS = 0.01
"""Share of the time of all operators below which an operator or module is not worth a rule."""


def exceptions(calibration: Calibration, policy: hs.Policy) -> list[Remedy]:
    """Return changes that bring the error down: the audit's own remedies, then the operators that lose most."""
    found = list(calibration.remedies)
    taken = {(r.field, r.pattern) for r in found}
    for spot in sorted(calibration.spots, key=lambda s: (s.overflows, s.error), reverse=True):
        if not (spot.overflows or spot.error > 0.0) or not _is_low(spot):
            continue
        field, pattern = ("modules", spot.module) if spot.module else ("ops", spot.op)
        if (field, pattern) not in taken and _exists(field, pattern):
            taken.add((field, pattern))
            found.append(Remedy(field=field, pattern=pattern, value="fp32", why=spot.facts))
    return [r for r in found if applied(policy, [(r.field, r.pattern, r.value)]) != policy]


def savings(calibration: Calibration, policy: hs.Policy, *, memory: bool = False) -> list[Remedy]:
    """Return changes that may save time or memory, at most `MOST`, those first that concern most of the time.

    Args:
        calibration: of the policy.
        policy: what is to be changed.
        memory: whether memory counts: then fields come first, which decide it.
    """
    share = 1.0 if memory else MINOR
    found = [(share, remedy) for remedy in _of_fields(policy)]
    found = sorted([*found, *_rules(calibration)], key=lambda pair: pair[0], reverse=True)
    chosen: list[Remedy] = []
    known: set[object] = set()
    for _, remedy in found:
        if applied(policy, [(remedy.field, remedy.pattern, remedy.value)]) == policy:
            continue
        spots = calibration.covered(remedy.field, remedy.pattern) if remedy.pattern else [remedy.field]
        same = (frozenset(spots), remedy.value)  # a class with one operator is tried once, by the operator
        if same not in known:
            known.add(same)
            chosen.append(remedy)
    return chosen[:MOST]


def _of_fields(policy: hs.Policy) -> Iterator[Remedy]:
    for field, values in FIELDS.items():
        if field in BEHIND_LOW and policy.params != "low":
            continue
        for value in values:
            if field == "master" and value == "master" and policy.dtype == "fp16":
                continue
            yield Remedy(field=field, pattern="", value=value, why=f"{field} was {getattr(policy, field)}")


def _rules(calibration: Calibration) -> Iterator[tuple[float, Remedy]]:
    """Yield (share of the time concerned, rule)."""
    spots = [spot for spot in calibration.spots if spot.op != "to"]
    modules: dict[str, float] = {}
    for spot in spots:
        if spot.module:
            modules[spot.module] = modules.get(spot.module, 0.0) + spot.time
    named = sorted(modules, key=lambda name: modules[name], reverse=True)[:NAMED]
    places = [
        *(("ops", op) for op in dict.fromkeys(spot.op for spot in spots) if _exists("ops", op)),
        *(("modules", f"class:{kind}") for kind in dict.fromkeys(spot.kind for spot in spots if spot.module)),
        *(("modules", module) for module in named),
    ]
    for field, pattern in places:
        concerned = [spot for spot in calibration.covered(field, pattern) if spot.op != "to"]
        share = sum(spot.time for spot in concerned)
        if share < COUNTS:
            continue
        worst = max(concerned, key=sensitivity)
        for value in _other_rules(concerned):
            yield share, Remedy(field=field, pattern=pattern, value=value, why=worst.facts)


def _other_rules(spots: list[Spot]) -> tuple[str, ...]:
    """Return the rules that these operators do not have: out of fp32 without a cast, or back into it."""
    if any(_is_low(spot) for spot in spots):
        return ("keep", "fp32") if any(spot.cast_bytes for spot in spots) else ("fp32",)
    return ("keep", "low")


def _is_low(spot: Spot) -> bool:
    return spot.format in FORMATS and FORMATS[spot.format].bits < LOW_BITS


def _exists(field: str, pattern: str) -> bool:
    """Return whether a policy may name it: of operators those of torch and registered ones."""
    if field != "ops":
        return True
    try:
        hs.Policy(ops=((pattern, "fp32"),))
    except hs.HalfstepError:
        return False
    return True
