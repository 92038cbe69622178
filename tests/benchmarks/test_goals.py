"""Goals are read from reports, and only from what was measured."""

from __future__ import annotations

from typing import Any

from benchmarks.goal_tables import goal_row
from benchmarks.goals import Goal, Reached, counted, fake_cuda, goals, step, times_faster, worst
from benchmarks.reports import Reports

NOTHING = Reports(cpu={}, gpu={}, counts={})


def ratio(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.125, "high": median + 0.125}


def report(dtype: str = "bf16", **ratios: float) -> dict[str, Any]:
    rows = {
        label: {"to_amp": ratio(value), "counts": {"saved_bytes": int(1000 * value)}, "curve": None}
        for label, value in ratios.items()
    }
    rows["torch.amp"] = {"counts": {"saved_bytes": 1000}, "curve": None}
    return {"title": "Case", "dtype": dtype, "rows": rows, "stages": {}}


def reports(**cases: dict[str, Any]) -> Reports:
    return Reports(cpu={"cases": cases}, gpu={}, counts={})


def test_without_reports_no_goal_is_met_or_missed() -> None:
    for goal in goals():
        assert goal.read(NOTHING) is None
        assert goal_row(goal, NOTHING)[2:] == ["not measured", ""]


def test_a_step_is_its_ratio_with_its_interval() -> None:
    found = step("gpt", "pure")(reports(gpt=report(pure=0.5)))
    assert found == Reached(value=0.5, low=0.375, high=0.625)
    assert step("gpt", "mixed")(reports(gpt=report(pure=0.5))) is None


def test_the_worst_case_is_named_and_fp16_is_not_asked() -> None:
    known = reports(a=report(mixed=0.5), b={**report(mixed=0.75), "title": "Other"}, c=report("fp16", mixed=9.0))
    found = worst("mixed", "to_amp")(known)
    assert found is not None and (found.value, found.where) == (0.75, "Other")


def test_counts_are_over_torch_amps() -> None:
    found = counted("saved_bytes", "pure")(reports(gpt256=report(pure=0.5)))
    assert found is not None and found.value == 0.5


def test_times_faster_turns_the_ratio_and_its_interval_around() -> None:
    found = times_faster("gpt", "mixed")(reports(gpt=report(mixed=0.25)))
    assert found is not None and (found.value, found.low, found.high) == (4.0, 1 / 0.375, 8.0)


def test_totals_of_fake_cuda_are_found() -> None:
    known = Reports(cpu={}, gpu={}, counts={"models": {"gpt": {"pure:fp16": {"summary": {"casts": 3}}}}})
    found = fake_cuda(lambda totals: totals["casts"])(known)
    assert found is not None and found.value == 3


def test_a_bound_is_kept_by_the_median_alone() -> None:
    goal = Goal(what="x", bound=0.5, read=step("gpt", "pure"))
    assert goal.met(Reached(value=0.5, high=0.6)) and not goal.met(Reached(value=0.51, low=0.4))
    assert not Goal(what="x", bound=2.0, least=True, read=goal.read).met(Reached(value=1.9, high=2.5))
    row = goal_row(goal, reports(gpt=report(pure=0.75)))
    assert row == ["x", "at most 0.5", "0.750 [0.625, 0.875]", "**no**"]
