"""The seeded faults are faults, the controls are healthy, and what is written about them is so.

The programs are those of benchmarks/faults, whose instruments `make faults` scores. A sample of them runs here; the
rest is marked `hours`, and a file that changes has to be frozen again, after ``pytest -m "" tests/faults``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import halfstep as hs
from benchmarks.faults import catalog, score, scored
from benchmarks.faults.case import Case, Control, Fault, marked_line, run
from benchmarks.faults.catalog import (
    CONTROLS,
    DEFINITIONS,
    LIST_A,
    LIST_A_RANKS,
    LIST_B,
    SECOND_A,
    SECOND_B,
    SECOND_CONTROLS,
)
from benchmarks.faults.observe import (
    bad_steps,
    bad_tensors,
    finite,
    first_sight,
    loss_of_the_bad_step,
    unhelped,
    unwatched,
)
from benchmarks.faults.plain import plain_bad_steps
from tests.two_processes import in_two_processes

# halfstep says, once, what it thinks of a static scale that cannot help
pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite:UserWarning")

ALL_A, ALL_B, ALL_CONTROLS = (*LIST_A, *SECOND_A), (*LIST_B, *SECOND_B), (*CONTROLS, *SECOND_CONTROLS)
Entry = TypeVar("Entry", bound=Fault | Control)
HARM = {"fp16": 0.002, "bf16": 0.02}
"""Largest relative error of a healthy gradient: a few roundings of the format."""


def each(name: str, entries: Iterable[Fault | Control]) -> Any:
    """Return the decorator that runs a test with each entry: a sample of them in `make test`, all with `-m ''`."""
    listed = list(entries)
    sample = {entry.name for entry in sampled(listed)}
    marks = {False: (), True: (pytest.mark.hours,)}
    cases = [pytest.param(entry, id=entry.name, marks=marks[entry.name not in sample]) for entry in listed]
    return pytest.mark.parametrize(name, cases)


def sampled(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return every tenth: the lists go through the files, so all kinds come."""
    return entries[::10]


def of_kind(kind: str) -> list[Fault]:
    return [fault for fault in ALL_A if fault.truth.kind == kind]


def test_the_lists_are_as_long_as_they_have_to_be_and_repeat_nothing() -> None:
    assert len(LIST_A) + len(LIST_A_RANKS) >= 30 and len(SECOND_A) >= 16
    assert len(LIST_B) >= 14 and len(SECOND_B) >= 6
    assert len(CONTROLS) >= 16 and len(SECOND_CONTROLS) >= 10
    names = [entry.name for entry in (*ALL_A, *LIST_A_RANKS, *ALL_B, *ALL_CONTROLS)]
    assert len(set(names)) == len(names)


# ------------------------------------------------------------------ list A


@each("fault", ALL_A)
def test_a_fault_of_list_a_breaks_the_stated_step_and_none_before(fault: Fault) -> None:
    assert bad_steps(fault.build())[:1] == [fault.truth.step]


@each("fault", (f for f in ALL_A if f.plain))
def test_it_breaks_the_same_step_in_torch_alone(fault: Fault) -> None:
    """torch.autocast in the same format, a static scale, an ordinary loop; low parameters are cast by hand."""
    assert list(plain_bad_steps(unwatched(fault.build())))[:1] == [fault.truth.step]


@each("fault", (f for f in ALL_A if f.truth.op))
def test_the_marked_line_is_the_one_that_makes_it(fault: Fault) -> None:
    """Seen by a witness that knows nothing of policies: who first made a non-finite number of finite ones."""
    truth, first, marked = fault.truth, first_sight(fault), marked_line(fault)
    assert marked is not None
    assert (first.file, first.line) == marked[:2]
    if truth.phase == "forward":
        assert first.op in (truth.op, *truth.also)
        assert first.module in (truth.module, *truth.also)
    else:
        assert math.isfinite(loss_of_the_bad_step(fault))
        assert truth.module in dict(fault.build().model.named_modules())


@each("fault", ALL_A)
def test_its_cures_cure_it_and_where_there_are_none_fp32_fails_too(fault: Fault) -> None:
    assert unhelped(fault) == []
    if fault.truth.op and not fault.truth.cures:
        assert bad_steps(fault.build(), hs.Policy.of("O0"))[:1] == [fault.truth.step]


@each("fault", of_kind("scale_too_high"))
def test_a_scale_is_too_high_by_two_to_the_ten(fault: Fault) -> None:
    scale = fault.build().policy.scale
    assert isinstance(scale, float)

    def bad(factor: float) -> list[int]:
        case = fault.build()
        return bad_steps(case, case.policy.replace(scale=scale * factor))

    assert bad(2.0**-10) == []
    assert bad(2.0**-9) == [fault.truth.step]


@each("fault", of_kind("bad_batch"))
def test_a_bad_batch_is_bad_and_the_batches_before_it_are_not(fault: Fault) -> None:
    case = fault.build()
    for number in range(1, fault.truth.step + 1):
        assert finite(case.batch(number)) == (number < fault.truth.step)


@each("fault", of_kind("bad_state"))
def test_bad_state_is_where_it_is_said_to_be_before_the_bad_step(fault: Fault) -> None:
    bad = bad_tensors(fault)
    assert fault.truth.parameter in bad
    assert bad <= {fault.truth.parameter, *fault.truth.also}


# ------------------------------------------------------------------ one bad rank


def _of_ranks(rank: int) -> dict[str, tuple[list[int], list[bool]]]:
    found = {fault.name: [r for _, r in run(fault.build())] for fault in LIST_A_RANKS}
    return {n: ([r.step for r in rs if r.skipped], [math.isfinite(r.loss) for r in rs]) for n, rs in found.items()}


@pytest.mark.dist
def test_one_bad_rank_makes_both_skip(tmp_path: Path) -> None:
    """All faults in one pair of processes: starting them is what takes long."""
    seen = in_two_processes(_of_ranks, tmp_path)
    for fault in LIST_A_RANKS:
        skipped, finite = zip(*(one[fault.name] for one in seen), strict=True)
        assert list(skipped) == [[fault.truth.step]] * 2, fault.name
        assert [rank for rank in (0, 1) if not all(finite[rank])] == [fault.truth.rank], fault.name


# ------------------------------------------------------------------ list B and the controls


@each("fault", ALL_B)
def test_a_fault_of_list_b_stays_finite_and_has_its_effect(fault: Fault) -> None:
    assert bad_steps(fault.build()) == []
    size, least = fault.effect()
    assert size >= least


@each("fault", ALL_B)
def test_the_truth_of_list_b_names_what_exists(fault: Fault) -> None:
    case = fault.build()
    truth = fault.truth
    held = dict((*case.model.named_parameters(), *case.model.named_buffers()))
    assert truth.module in dict(case.model.named_modules())
    assert not truth.parameter or truth.parameter in held
    assert truth.cause in {"underflow", "overflow", "rounding", "saturation", "swallowed_update", "low_state"}
    assert truth.role in {"activation", "gradient", "weight", "update", "state"}


@each("control", ALL_CONTROLS)
def test_a_control_trains_on(control: Control) -> None:
    results = [r for _, r in run(control.build())]
    assert all(math.isfinite(r.loss) for r in results)
    assert (control.skips > 0) <= sum(r.skipped for r in results) <= control.skips
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


@each("control", (c for c in SECOND_CONTROLS if not c.skips))
def test_what_scares_in_a_control_does_no_harm(control: Control) -> None:
    """Its gradients are those of fp32 to within the format's rounding."""
    case = control.build()
    found, wanted = (first_gradients(control.build(), p) for p in (case.policy, hs.Policy.of("O0")))
    assert float((found - wanted).norm() / wanted.norm()) <= HARM[case.policy.dtype]


# ------------------------------------------------------------------ the score


def right_verdict(fault: Fault) -> SimpleNamespace:
    truth, marked = fault.truth, marked_line(fault)
    line = "" if marked is None else f"{marked[0]}:{marked[1]} {marked[2]}"
    cures = (SimpleNamespace(verified=True),) if truth.cures else ()
    fields = {"kind": truth.kind, "op": truth.op, "module": truth.module, "phase": truth.phase, "rank": truth.rank}
    return SimpleNamespace(**fields, line=line, parameter=truth.parameter, cures=cures)


@each("fault", ALL_A)
def test_the_right_verdict_scores_and_a_wrong_one_does_not(fault: Fault) -> None:
    verdict = right_verdict(fault)
    assert score.located(verdict, fault) and score.cured_right(verdict, fault) and score.kind_right(verdict, fault)
    assert not score.located(None, fault) and not score.cured_right(None, fault)
    fields = ("op", "module", "line") if fault.truth.op else ("kind",)
    for field in fields:
        wrong = SimpleNamespace(**{**vars(verdict), field: "other.py:1 pass"})
        assert not score.located(wrong, fault), field
    other = SimpleNamespace(**{**vars(verdict), "cures": () if verdict.cures else (SimpleNamespace(verified=True),)})
    assert not score.cured_right(other, fault)


@each("fault", ALL_B)
def test_the_right_finding_scores_and_a_wrong_cause_does_not(fault: Fault) -> None:
    truth = fault.truth
    right = SimpleNamespace(cause=truth.cause, op=truth.op, module=truth.module, parameter=truth.parameter)
    assert score.flagged([right], fault)
    assert not score.flagged([SimpleNamespace(**{**vars(right), "cause": "?"})], fault)
    assert not score.flagged([SimpleNamespace(**{**vars(right), "module": "?", "parameter": ""})], fault)
    assert not score.flagged([], fault)


def test_a_control_is_alarmed_by_an_accusation_only() -> None:
    assert score.alarmed([SimpleNamespace(kind="overflow")])
    assert score.alarmed([], [SimpleNamespace(cause="underflow")])
    assert not score.alarmed([None, SimpleNamespace(kind="scale_too_high")])
    assert score.Share.of([("a", True), ("b", False)]) == score.Share(right=1, wrong=("b",))


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in sampled(ALL_A)])
def test_the_black_box_scores_on_a_sample(fault: Fault) -> None:
    verdict = scored.verdict_on(fault)
    assert score.located(verdict, fault) and score.cured_right(verdict, fault)
    assert score.kind_right(verdict, fault) == (fault.name != "long_audio")  # told as a scale that is too high


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in sampled(ALL_B)])
def test_audit_or_monitor_score_on_a_sample(fault: Fault) -> None:
    assert score.flagged([*scored.flags(fault), *scored.watched(fault)], fault)


@pytest.mark.parametrize("control", [pytest.param(control, id=control.name) for control in sampled(ALL_CONTROLS)])
def test_nothing_is_said_of_a_sample_of_healthy_programs(control: Control) -> None:
    assert not score.alarmed(scored.accusations(control))
    assert scored.flags(control) == [] and scored.watched(control) == []


# ------------------------------------------------------------------ frozen


def test_the_definitions_are_those_that_were_frozen() -> None:
    """After a change: a fault is wrong only if torch or halfstep proves it; then freeze again, with the new date."""
    here = Path(catalog.__file__).parent
    head, *lines = (here / "frozen.txt").read_text(encoding="utf-8").splitlines()
    date.fromisoformat(head.removeprefix("# frozen "))
    kept = {line.split()[1]: line.split()[0] for line in lines}
    now = {f"{name}.py": hashlib.sha256((here / f"{name}.py").read_bytes()).hexdigest() for name in DEFINITIONS}
    assert kept == now
