"""Calibration: what one audit measured of a policy, as plain values, and the changes of it that are worth a try.

Nothing here is measured again: a race tells what a change is worth.

Note [probes]: which exceptions bring gradients back to those of fp32 is measured by one forward and backward pass each.
Local errors do not rank exceptions: every bf16 product loses two thousandths, whether a cancellation behind it makes
that the whole result or nothing. A probe has everything in it that comes after.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.advise.tune.result import Change
from halfstep.formats import FORMATS
from halfstep.tasks.machine import generators_kept
from halfstep.tasks.task import Task

RULED = ("ops", "modules")  # fields of a policy that are lists of rules

FORWARD = ("activation", "activation gradient")

LOW_BITS = 32  # a format with fewer bits rounds what fp32 keeps

FIELDS: Mapping[str, tuple[str, ...]] = {  # fields of a policy that cost time or memory, and the values to try
    "residual": ("low", "fp32"),
    "params": ("low",),
    "norms": ("low", "fp32"),
    "master": ("master", "stochastic", "kahan"),  # "auto" is split in bf16, master in fp16
    "inputs": ("low", "keep"),
    "state": ("low",),
    "grads": ("param",),
}

BEHIND_LOW = ("norms", "master", "grads")  # fields that do nothing under ``params="fp32"``
MOST = 16  # changes that are tried at once
NAMED = 6  # modules that are tried one by one, the most expensive ones

LINEAR = "modules", "class:Linear"
MINOR = 0.05  # share of the time as which fields rank where only time counts: presets show most of what they do
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


def savings(
    calibration: Calibration, policy: hs.Policy, *, memory: bool = False, eight_bits: bool = False
) -> list[Change]:
    """Return changes that may save time or memory, at most `MOST`, those first that concern most of the time.

    `eight_bits`: whether linear layers can multiply in fp8 units.
    """
    share = 1.0 if memory else MINOR  # where memory counts, fields come first, which decide it
    found: list[tuple[float, Change]] = []
    for field, values in FIELDS.items():
        why = f"{field} was {getattr(policy, field)}"
        if policy.params == "low" or field not in BEHIND_LOW:
            new = [value for value in values if policy.dtype != "fp16" or (field, value) != ("master", "master")]
            found += [(share, Change(field=field, value=value, why=why)) for value in new]
    if eight_bits and (linear := calibration.covered(*LINEAR)):
        time = sum(spot.time for spot in linear)
        found.append((time, Change(field=LINEAR[0], pattern=LINEAR[1], value="fp8", why="the device has fp8 units")))
    found = sorted([*found, *_rules(calibration)], key=lambda pair: pair[0], reverse=True)
    chosen: dict[object, Change] = {}
    for _, change in found:
        if applied(policy, [change]) != policy:
            spots = calibration.covered(change.field, change.pattern) if change.pattern else [change.field]
            # a class with one operator is tried once, by the operator
            chosen.setdefault((frozenset(spots), change.value), change)
    return list(chosen.values())[:MOST]


def _rules(calibration: Calibration) -> Iterator[tuple[float, Change]]:
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


WORTH = 0.75  # of the error: an exception that leaves more is not worth its casts
MOST_CHANGES = 4  # exceptions of a chain

CLOSE = 1.1  # times the least error: exceptions within it are equally good, and the one for the least time is taken
ENOUGH = 0.05  # error that the rounding of low products may leave in a healthy model
LARGE = 0.5  # share of the time of all operators: a rule that concerns more makes another preset of the policy
PATTERNS = 12  # rules that are probed, the shares of the time falling
SCALE = 2.0**10  # of the loss of a probe in fp16, whose small gradients would be zero
BACK = {"inputs": "keep", "residual": "fp32", "norms": "fp32"}  # fields and the values that keep digits


class _GradientsAreThereError(Exception):
    """Ends a step after its gradients are known: it is to change nothing."""


def gradient_error(
    task: Task, model: nn.Module, batch: tuple[Any, ...], policy: hs.Policy, reference: Sequence[Tensor]
) -> float:
    """Return how far the gradients of `model` under `policy` are from `reference`, from 0 to 1.

    The mean over the parameters of the relative error, where one that is wrong altogether, or not finite, counts as 1:
    gradients that are nearly zero, such as those of a bias before a norm, weigh no more than others. `model` has fp32
    parameters and stays as it is; `reference` is what `gradients` returns without a policy.
    """
    found = gradients(task, model, batch, policy)
    errors = []
    for own, wide in zip(found, reference, strict=True):
        size = float(wide.double().norm())
        if size > 0.0:
            error = float((own.double() - wide.double()).norm()) / size
            errors.append(min(error, 1.0) if math.isfinite(error) else 1.0)
    return sum(errors) / len(errors) if errors else math.nan


def gradients(task: Task, model: nn.Module, batch: tuple[Any, ...], policy: hs.Policy | None) -> list[Tensor]:
    """Return the gradients of one batch, fp32: under `policy` as a TrainStep computes them, None: without a region."""
    own = copy.deepcopy(model)
    scale = SCALE if policy is not None and policy.dtype == "fp16" else 1.0
    found: list[Tensor] = []

    def loss_fn(model: nn.Module, *batch: Any) -> Any:
        returned = task.loss_fn(model, *batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        kept = [p for p in model.parameters() if p.requires_grad]
        made = torch.autograd.grad(loss * scale, kept, allow_unused=True)
        found.extend(torch.zeros(()) if g is None else g.detach().float() / scale for g in made)
        raise _GradientsAreThereError

    with generators_kept(), suppress(_GradientsAreThereError):
        torch.manual_seed(0)
        if policy is None:
            loss_fn(own, *batch)
        else:
            hs.TrainStep(own, task.optimizer(own), loss_fn, policy=policy, blackbox=False)(*batch)
    return found


def options(calibration: Calibration, policy: hs.Policy, remedies: Sequence[Change]) -> list[tuple[float, Change]]:
    """Return (share of the time that is concerned, change) of `remedies` and of what else may bring the error down."""
    total = sum(spot.time for spot in calibration.spots) or 1.0
    rules = [r for r in remedies if r.field in {"ops", "modules"} and r.value == "fp32"]
    fields = {(r.field, r.value): r for r in remedies if r not in rules}
    for field, value in BACK.items():
        fields.setdefault((field, value), Change(field=field, value=value, why=""))
    found = [(0.0, remedy) for remedy in fields.values()]
    outermost = (spot.module.partition(".")[0] for spot in calibration.spots if spot.module)
    patterns = dict.fromkeys([*((r.field, r.pattern) for r in rules), *calibration.places(outermost)])
    shares = [(sum(spot.time for spot in calibration.covered(*place)) / total, *place) for place in patterns]
    small = sorted((s for s in shares if s[0] <= LARGE), reverse=True)[:PATTERNS]
    found += [(share, Change(field=field, pattern=pattern, value="fp32", why="")) for share, field, pattern in small]
    return [(share, change) for share, change in found if applied(policy, [change]) != policy]


def chain(
    error: Callable[[hs.Policy], float], policy: hs.Policy, found: Sequence[tuple[float, Change]]
) -> list[Change]:
    """Return changes of `policy`, each the one that brings `error` down most, as long as it falls by a quarter.

    Where no single change does, pairs with a change of a field are tried: a digit that the inputs have lost is not
    brought back behind them, and one that an operator loses is not kept by its inputs. `found`: (cost, change).
    """
    made: list[Change] = []
    least = error(policy)
    while len(made) < MOST_CHANGES and least > ENOUGH:
        left = [(cost, (change,)) for cost, change in found]
        best = _best(error, policy, left, WORTH * least)
        if best is None:
            fields = [(cost, change) for cost, change in found if not change.pattern]
            rules = [(cost, change) for cost, change in found if change.pattern]
            pairs = [(a + b, (r, s)) for (a, r), (b, s) in itertools.product(fields, rules)]
            best = _best(error, policy, pairs, WORTH * least)
        if best is None:
            break
        after, changes = best
        why = f"brings the error of the gradients from {least:.2g} to {after:.2g}"
        made += [replace(change, why=why) for change in changes]
        policy, least = applied(policy, changes), after
        found = [(cost, change) for cost, change in found if change not in changes]
    return made


def _best(
    error: Callable[[hs.Policy], float], policy: hs.Policy, found: Sequence[tuple[float, tuple[Change, ...]]],
    limit: float,
) -> tuple[float, tuple[Change, ...]] | None:  # fmt: skip
    """Return (error, changes) of the cheapest change whose error is close to the least; None if all exceed `limit`."""
    measured = [(error(applied(policy, changes)), cost, changes) for cost, changes in found]
    good = [m for m in measured if m[0] < limit]  # nan is not
    if not good:
        return None
    near = CLOSE * min(m[0] for m in good)
    after, _, changes = min((m for m in good if m[0] <= near), key=lambda m: m[1])
    return after, changes
