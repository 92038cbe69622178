"""The second set: its faults are faults, its controls are healthy, and what is written about them is so."""

from __future__ import annotations

import hashlib
import math
from datetime import date
from pathlib import Path

import pytest
import torch
from torch import Tensor

import halfstep as hs
from tests.faults.case import Case, Control, Fault, marked_line, run
from tests.faults.catalog import CONTROLS, LIST_A, LIST_A_RANKS, LIST_B
from tests.faults.observe import (
    bad_steps,
    bad_tensors,
    finite,
    first_sight,
    loss_of_the_bad_step,
    unhelped,
    unwatched,
)
from tests.faults.plain import plain_bad_steps
from tests.faults.second.catalog import SECOND_A, SECOND_B, SECOND_CONTROLS, SECOND_DEFINITIONS

# halfstep says, once, what it thinks of a static scale that cannot help
pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite:UserWarning")

A = [pytest.param(fault, id=fault.name) for fault in SECOND_A]
PRODUCERS = [pytest.param(fault, id=fault.name) for fault in SECOND_A if fault.truth.op]
PLAIN = [pytest.param(fault, id=fault.name) for fault in SECOND_A if fault.plain]
B = [pytest.param(fault, id=fault.name) for fault in SECOND_B]
HEALTHY = [pytest.param(control, id=control.name) for control in SECOND_CONTROLS]
HARM = {"fp16": 0.002, "bf16": 0.02}
"""Largest relative error of a healthy gradient: a few roundings of the format."""


def of_kind(kind: str) -> list[Fault]:
    return [fault for fault in SECOND_A if fault.truth.kind == kind]


def test_the_second_lists_are_long_and_repeat_nothing_of_the_first() -> None:
    assert len(SECOND_A) >= 16
    assert len(SECOND_B) >= 6
    assert len(SECOND_CONTROLS) >= 10
    names = [fault.name for fault in (*LIST_A, *LIST_A_RANKS, *LIST_B, *SECOND_A, *SECOND_B)]
    names += [control.name for control in (*CONTROLS, *SECOND_CONTROLS)]
    assert len(set(names)) == len(names)


# ------------------------------------------------------------------ list A


@pytest.mark.parametrize("fault", A)
def test_a_fault_breaks_the_stated_step_and_none_before(fault: Fault) -> None:
    assert bad_steps(fault.build())[:1] == [fault.truth.step]


@pytest.mark.parametrize("fault", PLAIN)
def test_it_breaks_the_same_step_in_torch_alone(fault: Fault) -> None:
    assert list(plain_bad_steps(unwatched(fault.build())))[:1] == [fault.truth.step]


@pytest.mark.parametrize("fault", PRODUCERS)
def test_the_marked_line_is_the_one_that_makes_it(fault: Fault) -> None:
    truth, first, marked = fault.truth, first_sight(fault), marked_line(fault)
    assert marked is not None
    assert (first.file, first.line) == marked[:2]
    if truth.phase == "forward":
        assert first.op in (truth.op, *truth.also)
        assert first.module in (truth.module, *truth.also)
    else:
        assert math.isfinite(loss_of_the_bad_step(fault))
        assert truth.module in dict(fault.build().model.named_modules())


@pytest.mark.parametrize("fault", A)
def test_its_cures_cure_it_and_where_there_are_none_fp32_fails_too(fault: Fault) -> None:
    assert unhelped(fault) == []
    if fault.truth.op and not fault.truth.cures:
        assert bad_steps(fault.build(), hs.Policy.of("O0"))[:1] == [fault.truth.step]


@pytest.mark.parametrize("fault", of_kind("scale_too_high"), ids=lambda f: str(f.name))
def test_a_scale_is_too_high_by_two_to_the_ten(fault: Fault) -> None:
    policy = fault.build().policy
    assert isinstance(policy.scale, float)
    assert bad_steps(fault.build(), policy.replace(scale=policy.scale * 2.0**-10)) == []
    assert bad_steps(fault.build(), policy.replace(scale=policy.scale * 2.0**-9)) == [fault.truth.step]


@pytest.mark.parametrize("fault", of_kind("bad_batch"), ids=lambda f: str(f.name))
def test_a_bad_batch_is_bad_and_the_batches_before_it_are_not(fault: Fault) -> None:
    case = fault.build()
    for number in range(1, fault.truth.step + 1):
        assert finite(case.batch(number)) == (number < fault.truth.step)


@pytest.mark.parametrize("fault", of_kind("bad_state"), ids=lambda f: str(f.name))
def test_bad_state_is_where_it_is_said_to_be_before_the_bad_step(fault: Fault) -> None:
    bad = bad_tensors(fault)
    assert fault.truth.parameter in bad
    assert bad <= {fault.truth.parameter, *fault.truth.also}


# ------------------------------------------------------------------ list B and the controls


@pytest.mark.parametrize("fault", B)
def test_a_fault_of_list_b_stays_finite_and_has_its_effect(fault: Fault) -> None:
    assert bad_steps(fault.build()) == []
    assert fault.effect is not None
    size, least = fault.effect()
    assert size >= least


@pytest.mark.parametrize("fault", B)
def test_the_truth_of_list_b_names_what_exists(fault: Fault) -> None:
    truth, model = fault.truth, fault.build().model
    assert truth.module in dict(model.named_modules())
    assert not truth.parameter or truth.parameter in dict((*model.named_parameters(), *model.named_buffers()))
    assert truth.cause in {"underflow", "overflow", "rounding", "saturation", "swallowed_update", "low_state"}
    assert truth.role in {"activation", "gradient", "weight", "update", "state"}


@pytest.mark.parametrize("control", HEALTHY)
def test_a_control_trains_on(control: Control) -> None:
    results = [r for _, r in run(unwatched(control.build()))]
    assert all(math.isfinite(r.loss) for r in results)
    assert sum(r.skipped for r in results) <= control.skips
    assert any(r.skipped for r in results) == (control.skips > 0)
    assert not results[-1].skipped


def first_gradients(case: Case, policy: hs.Policy) -> Tensor:
    """Return all gradients of the first call, unscaled, as one vector."""
    found = {}

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        found[parameter] = parameter.grad.double().flatten().clone()

    trained = [p for p in case.model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(keep)
    torch.manual_seed(7)
    next(run(unwatched(case), policy))
    return torch.cat([found[p] for p in trained]) / (policy.scale if isinstance(policy.scale, float) else 1.0)


@pytest.mark.parametrize("control", [c for c in SECOND_CONTROLS if not c.skips], ids=lambda c: str(c.name))
def test_what_scares_in_a_control_does_no_harm(control: Control) -> None:
    """Its gradients are those of fp32 to within the format's rounding."""
    case = control.build()
    found, wanted = (first_gradients(control.build(), p) for p in (case.policy, hs.Policy.of("O0")))
    assert float((found - wanted).norm() / wanted.norm()) <= HARM[case.policy.dtype]


# ------------------------------------------------------------------ frozen


def test_the_definitions_are_those_that_were_frozen() -> None:
    """After a change: a fault is wrong only if torch or halfstep proves it; then freeze again, with the new date."""
    here = Path(__file__).parent
    head, *lines = (here / "frozen.txt").read_text(encoding="utf-8").splitlines()
    date.fromisoformat(head.removeprefix("# frozen "))
    kept = {line.split()[1]: line.split()[0] for line in lines}
    now = {f"{name}.py": hashlib.sha256((here / f"{name}.py").read_bytes()).hexdigest() for name in SECOND_DEFINITIONS}
    assert kept == now
