"""What happens when a seeded program runs, whatever the instruments say of it; tests compare it with the truth.

The black box is off: it is the program that is looked at here, not the diagnosis.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import halfstep as hs
from benchmarks.faults.case import Case, Fault, cured, run, start
from benchmarks.faults.witness import Sight, Witness

__all__ = ["bad_steps", "bad_tensors", "finite", "first_sight", "loss_of_the_bad_step", "unhelped", "unwatched"]


def unwatched(case: Case) -> Case:
    """Return a case without black box, whose loss_fn returns the loss alone."""

    def loss_alone(model: Any, *batch: Any) -> Any:
        returned = case.loss_fn(model, *batch)
        return returned[0] if isinstance(returned, tuple) else returned

    return replace(case, loss_fn=loss_alone, options={**case.options, "blackbox": False})


def bad_steps(case: Case, policy: hs.Policy | None = None) -> list[int]:
    """Return the calls whose loss is not finite or whose update was refused."""
    return [r.step for _, r in run(unwatched(case), policy) if r.skipped or not math.isfinite(r.loss)]


def loss_of_the_bad_step(fault: Fault) -> float:
    """Return the loss of the step that the truth names."""
    return next(r.loss for _, r in run(unwatched(fault.build())) if r.step == fault.truth.step)


def first_sight(fault: Fault) -> Sight:
    """Return what a witness sees first, in the phase of the truth: one who knows nothing of policies."""
    case, truth = unwatched(fault.build()), fault.truth
    witness = Witness(case.model)
    step = start(replace(case, loss_fn=witness.watching(case.loss_fn)))
    with witness.on():
        for number in range(1, truth.step + 1):
            case.before(number)
            witness.step(step, case.batch(number))
    return (witness.forward if truth.phase == "forward" else witness.backward)[0]


def unhelped(fault: Fault) -> list[str]:
    """Return the cures of the truth under which some step is still not finite."""
    policy = fault.build().policy
    return [cure for cure in fault.truth.cures if bad_steps(fault.build(), cured(policy, cure, fault.truth))]


def bad_tensors(fault: Fault) -> set[str]:
    """Return the parameters and buffers that are not finite when the bad step begins."""
    case = unwatched(fault.build())
    step = start(case)
    for number in range(1, fault.truth.step):
        case.before(number)
        step(*case.batch(number))
    case.before(fault.truth.step)
    held = (*case.model.named_parameters(), *case.model.named_buffers())
    return {name for name, value in held if not finite(value)}


def finite(value: Any) -> bool:
    """Say whether all numbers of a tensor, or of tuples and dicts of tensors, are finite."""
    if isinstance(value, Tensor):
        return bool(torch.isfinite(value).all())
    parts = value.values() if isinstance(value, dict) else value
    return all(finite(part) for part in parts)
