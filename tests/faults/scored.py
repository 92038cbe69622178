"""The score of the instruments on the fault bench: ``python -m tests.faults.scored``, or `make faults`.

Every fault of list A runs to its bad step, which `TrainStep.explain` is asked about; controls run to their end, and
every step that was skipped is asked about. Lists of two processes are not in it.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import halfstep as hs
from tests.faults.case import Control, Fault, start
from tests.faults.catalog import CONTROLS, LIST_A, LIST_B
from tests.faults.score import Share, alarmed, cured_right, flagged, kind_right, located

__all__ = ["main", "verdict_on"]

CAUSES = {"overflow_risk": "overflow"}
"""Kind of a finding -> cause in the words of the bench, where they differ."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A finding in the words of `score`."""

    cause: str
    module: str
    op: str
    parameter: str


def verdict_on(fault: Fault) -> hs.Verdict | None:
    """Train `fault` to its bad step and return what the black box says of it."""
    case = fault.build()
    step = start(case)
    for number in range(1, case.steps + 1):
        case.before(number)
        result = step(*case.batch(number)).host()
        if result.skipped and number >= fault.truth.step:
            return step.explain()
    return None


def accusations(control: Control) -> Iterator[hs.Verdict]:
    """Train `control` and yield a verdict on every step that was skipped."""
    case = control.build()
    step = start(case)
    for number in range(1, case.steps + 1):
        case.before(number)
        if step(*case.batch(number)).host().skipped:
            yield step.explain()


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


def main() -> None:
    """Print the score."""
    torch.set_num_threads(1)
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    verdicts = [(fault, tried(fault.name, verdict_on, fault)) for fault in LIST_A]
    print(told("A, located (operator, module, line)", Share.of((f.name, located(v, f)) for f, v in verdicts)))
    print(told("A, kind", Share.of((f.name, kind_right(v, f)) for f, v in verdicts)))
    print(told("A, verified cure, or rightly none", Share.of((f.name, cured_right(v, f)) for f, v in verdicts)))
    found = [(fault, tried(fault.name, flags, fault) or []) for fault in LIST_B]
    print(told("B, flagged with its cause by the audit", Share.of((f.name, flagged(some, f)) for f, some in found)))
    seen = [(fault, some + (tried(fault.name, watched, fault) or [])) for fault, some in found]
    print(told("B, by the audit or by Monitor", Share.of((f.name, flagged(some, f)) for f, some in seen)))
    quiet = [(c, list(tried(c.name, lambda c=c: list(accusations(c))) or ())) for c in CONTROLS]
    print(told("controls not accused by the black box", Share.of((c.name, not alarmed(v)) for c, v in quiet)))
    audited = [(c, tried(c.name, flags, c) or []) for c in CONTROLS]
    print(told("controls without a finding of the audit", Share.of((c.name, not some) for c, some in audited)))
    run = [(c, tried(c.name, watched, c) or []) for c in CONTROLS]
    print(told("controls without a finding of Monitor", Share.of((c.name, not some) for c, some in run)))


if __name__ == "__main__":
    main()
