"""The score of the instruments on the fault bench: ``python -m benchmarks.faults.scored``, or `make faults`.

Every fault of list A runs to its bad step, which `TrainStep.explain` is asked about; controls run to their end, and
every step that was skipped or had a loss that is not finite is asked about. Faults of two processes run in two of them,
and what both say has to be right. ``--verbose`` shows what was said and expected where it is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import halfstep as hs
from benchmarks.faults.case import Control, Fault, marked_line, start
from benchmarks.faults.catalog import CONTROLS, LIST_A, LIST_A_RANKS, LIST_B, SECOND_A, SECOND_B, SECOND_CONTROLS
from benchmarks.faults.score import Share, alarmed, cured_right, flagged, kind_right, located
from tests.two_processes import in_two_processes

__all__ = ["main", "verdict_on"]

ONE: tuple[tuple[str, Sequence[Fault]], ...] = (("A", LIST_A), ("A, second set", SECOND_A))
"""Groups of faults that end in a step that is not finite, each scored apart: (title, faults)."""

RANKS: tuple[tuple[str, Sequence[Fault]], ...] = (("A, two processes", LIST_A_RANKS),)
"""The same of faults that run in two processes."""

FINITE: tuple[tuple[str, Sequence[Fault]], ...] = (("B", LIST_B), ("B, second set", SECOND_B))
"""Groups of faults that stay finite."""

HEALTHY: tuple[tuple[str, Sequence[Control]], ...] = (("controls", CONTROLS), ("controls, second set", SECOND_CONTROLS))
"""Groups of healthy programs."""

CAUSES = {"overflow_risk": "overflow"}
"""Kind of a finding -> cause in the words of the bench, where they differ."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A finding in the words of `score`."""

    cause: str
    module: str
    op: str
    parameter: str


def not_finite(result: hs.step.HostStepResult) -> bool:
    """Return whether a step gives a reason to call `explain`."""
    return result.skipped or not math.isfinite(result.loss)


def verdict_on(fault: Fault) -> hs.lens.Verdict | None:
    """Train `fault` to its bad step and return what the black box says of it."""
    case = fault.build()
    step = start(case)
    for number in range(1, case.steps + 1):
        case.before(number)
        result = step(*case.batch(number)).host()
        if not_finite(result) and number >= fault.truth.step:
            return step.explain()
    return None


def accusations(control: Control) -> list[hs.lens.Verdict]:
    """Train `control` and return a verdict on every step that gives a reason to ask."""
    case = control.build()
    step = start(case)
    found = []
    for number in range(1, case.steps + 1):
        case.before(number)
        if not_finite(step(*case.batch(number)).host()):
            found.append(step.explain())
    return found


def flags(fault: Fault | Control) -> list[Flag]:
    """Audit the first steps of a program and return what is found."""
    case = fault.build()
    batches = (case.batch(number) for number in itertools.count(1))
    known = {n: value for n, value in case.options.items() if n in {"clip_norm", "accumulate", "scaler"}}
    steps = max(1, min(3, case.steps // known.get("accumulate", 1)))
    audit = hs.audit(case.model, batches, case.loss_fn, case.policy, case.optimizer, steps=steps, **known)
    return [_flag(f.kind, f.module, f.op, f.parameter) for f in audit.findings()]


def watched(fault: Fault | Control) -> list[Flag]:
    """Run a program to its end under a Monitor that samples every update, and return what it finds."""
    case = fault.build()
    step = start(case)
    monitor = hs.Monitor(step, every=1, activations=True)
    for number in range(1, case.steps + 1):
        case.before(number)
        step(*case.batch(number))
    step.flush()
    names = {name for name, _ in case.model.named_parameters()}
    return [
        _flag(f.kind, place.rpartition(".")[0] if place in names else place, "", place if place in names else "")
        for f in monitor.findings()
        for place in f.where
    ]


def _flag(kind: str, module: str, op: str, parameter: str) -> Flag:
    return Flag(cause=CAUSES.get(kind, kind), module=module, op=op, parameter=parameter)


def verdicts_of_ranks(faults: Sequence[Fault]) -> dict[str, list[hs.lens.Verdict | None]]:
    """Train faults of two processes to their bad steps; return name -> what the black box of each process says."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_two_processes(_of_rank, folder, [fault.name for fault in faults])
    return {fault.name: [one[fault.name] for one in found] for fault in faults}


def _of_rank(rank: int, names: list[str]) -> dict[str, hs.lens.Verdict | None]:
    _quiet()
    return {fault.name: verdict_on(fault) for _, faults in RANKS for fault in faults if fault.name in names}


# ------------------------------------------------------------------ printing


def told(name: str, share: Share) -> str:
    total = share.right + len(share.wrong)
    wrong = f"; not: {', '.join(share.wrong)}" if share.wrong else ""
    return f"{name}: {share.right} of {total}, {100 * share.value:.0f}%{wrong}"


def tried(name: str, function: Any, *args: Any) -> Any:
    """Return what `function` gives, or None with the error printed."""
    try:
        return function(*args)
    except Exception as error:
        print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        return None


def tell_located(title: str, said: Sequence[tuple[Fault, Sequence[hs.lens.Verdict | None]]], *, verbose: bool) -> None:
    """Print the scores of faults of list A; each comes with the verdicts of all its processes."""
    judges = (
        ("located (operator, module, line)", located),
        ("kind", kind_right),
        ("verified cure, or rightly none", cured_right),
    )
    for what, judge in judges:
        judged = [(fault, all(judge(v, fault) for v in verdicts)) for fault, verdicts in said]
        print(told(f"{title}, {what}", Share.of((f.name, right) for f, right in judged)))
        for fault, right in judged if verbose else ():
            if not right:
                print(f"    {fault.name}: expected {expected(fault)}")
                for verdict in dict(said)[fault]:
                    print("      " + str(verdict).replace("\n", "\n      "))


def tell_flagged(title: str, faults: Sequence[Fault], *, verbose: bool) -> None:
    """Score faults of list B and print it: by the audit, and by the audit or Monitor."""
    audited = [(fault, tried(fault.name, flags, fault) or []) for fault in faults]
    print(told(f"{title}, flagged with its cause by the audit", Share.of((f.name, flagged(s, f)) for f, s in audited)))
    seen = [(fault, [*some, *(tried(fault.name, watched, fault) or [])]) for fault, some in audited]
    print(told(f"{title}, by the audit or by Monitor", Share.of((f.name, flagged(some, f)) for f, some in seen)))
    for fault, some in seen if verbose else ():
        if not flagged(some, fault):
            print(f"    {fault.name}: expected {expected(fault)}")
            for flag in some:
                print(f"      {flag}")


def tell_quiet(title: str, controls: Sequence[Control], *, verbose: bool) -> None:
    """Score controls and print it. One that raises is not right."""
    said = [(c, tried(c.name, accusations, c)) for c in controls]
    quiet = Share.of((c.name, verdicts is not None and not alarmed(verdicts)) for c, verdicts in said)
    print(told(f"{title}, not accused by the black box", quiet))
    for control, verdicts in said if verbose else ():
        for verdict in verdicts or ():
            if alarmed([verdict]):
                print(f"    {control.name}, which is healthy ({control.scare}): {verdict.headline}")
    for who, look in (("the audit", flags), ("Monitor", watched)):
        found = [(control, tried(control.name, look, control)) for control in controls]
        print(told(f"{title}, without a finding of {who}", Share.of((c.name, some == []) for c, some in found)))
        for control, some in found if verbose else ():
            for flag in some or ():
                print(f"    {control.name}, which is healthy ({control.scare}): {flag}")


def expected(fault: Fault) -> str:
    """Return the truth in one line."""
    told = {name: value for name, value in vars(fault.truth).items() if value not in ("", (), None)}
    line = marked_line(fault)
    place = "" if line is None else f" at {line[0]}:{line[1]} {line[2]}"
    return ", ".join(f"{name} {value}" for name, value in told.items()) + place


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def main() -> None:
    """Print the scores, of each group apart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.scored")
    parser.add_argument("--verbose", action="store_true", help="show what was said and expected where it is wrong")
    verbose = parser.parse_args().verbose
    _quiet()
    for title, faults in ONE:
        tell_located(title, [(f, (tried(f.name, verdict_on, f),)) for f in faults], verbose=verbose)
    for title, faults in RANKS:
        verdicts = tried(title, verdicts_of_ranks, faults) or {}
        tell_located(title, [(f, verdicts.get(f.name, [None])) for f in faults], verbose=verbose)
    for title, faults in FINITE:
        tell_flagged(title, faults, verbose=verbose)
    for title, controls in HEALTHY:
        tell_quiet(title, controls, verbose=verbose)


if __name__ == "__main__":
    main()
