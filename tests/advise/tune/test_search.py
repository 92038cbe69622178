"""The search: with given times, losses and audits it takes the cheapest candidate that is shown to be good."""

from __future__ import annotations

import math
from typing import Any

import pytest

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration
from halfstep.advise.tune.lab import Reference
from halfstep.advise.tune.result import Tried
from halfstep.advise.tune.search import Search, Weights
from halfstep.tasks.candidates import Candidate
from tests.advise.tune.fake import REFERENCE, FakeLab, proof, spot

TIME, MEMORY = Weights(time=1.0, memory=0.0), Weights(time=0.0, memory=1.0)
PRESET_TIMES = {"O0": 1.0, "torch": 0.9, "mixed": 0.8, "O2": 0.7, "pure": 0.69, "lean": 0.95}


def preset_time(policy: hs.Policy, compile: bool = False) -> float:
    return PRESET_TIMES[policy.name]


def searched(
    lab: Any, weights: Weights = TIME, *, compile: bool = False, bound: float | None = 0.01,
    dtypes: tuple[str, ...] = ("bf16",), reference: Reference = REFERENCE,
) -> Search:  # fmt: skip
    search = Search(lab, weights, 40, bound=bound, dtypes=dtypes, seeds=0, compile=compile)
    search.run(reference)
    return search


def best(search: Search) -> Tried:
    return search[search.best]


def test_the_fastest_preset_within_the_bound_is_proven_and_taken() -> None:
    lab = FakeLab(time=preset_time)
    search = searched(lab)
    assert best(search).label == "pure bf16" and search.proofs[0][1].holds and search.finished
    assert lab.trained == ["pure bf16"]  # what cannot be chosen is not
    (mixed,) = (tried for tried in search.measured() if tried.label == "mixed bf16")
    assert (mixed.verdict, mixed.reason) == ("slower", "not cheaper for certain than pure bf16")


def test_a_preset_has_to_be_better_than_a_safer_one_by_more_than_is_resolved() -> None:
    lab = FakeLab(time=lambda p, c: {**PRESET_TIMES, "pure": 0.698}[p.name])
    assert best(searched(lab)).label == "O2 bf16"


def test_where_nothing_is_faster_it_stays_in_fp32_and_nothing_is_proven() -> None:
    search = searched(FakeLab(time=lambda p, c: 1.0 if p.name == "O0" else 1.2))
    assert best(search).label == "O0" and not search.proofs and "no cheaper candidate" in search.reason(None)


def test_a_preset_beyond_the_bound_is_not_taken_however_fast() -> None:
    search = searched(FakeLab(time=preset_time, rise=lambda p: 0.02 if p.params == "low" else 0.0))
    assert best(search).label == "mixed bf16" and search["O2 bf16"].verdict == "worse"
    assert "+2.00 %" in search["O2 bf16"].reason and "+1.00 % allowed" in search["O2 bf16"].reason


def test_an_audit_that_failed_is_in_the_notes_once() -> None:
    class Blind(FakeLab):
        def calibration(self, candidate: Candidate, steps: int) -> Calibration:
            return Calibration(failed="RuntimeError: no hooks here")

    search = searched(Blind(time=preset_time))
    assert [note for note in search.notes if note.endswith("looked at: RuntimeError: no hooks here")] == search.notes
    assert len(search.notes) == 1


def test_without_a_bound_the_spread_of_fp32_is_the_bound() -> None:
    lab = FakeLab(time=preset_time, rise=lambda p: 0.03 if p.name == "pure" else 0.01)
    search = searched(lab, bound=None)
    assert search.bound == pytest.approx(0.02) and best(search).label == "O2 bf16"


def test_a_fast_preset_beyond_the_bound_gets_the_most_sensitive_exceptions() -> None:
    spots = [
        spot("linear", "head"), spot("softmax", "attn", error=0.3, headroom=0.4), spot("gelu", "up"),
    ]  # fmt: skip

    def time(policy: hs.Policy, compile: bool) -> float:
        return PRESET_TIMES[policy.name] + 0.02 * len(policy.modules)

    def rise(policy: hs.Policy) -> float:
        return 0.0 if ("attn", "fp32") in policy.modules or policy.params == "fp32" else 0.5

    found = best(searched(FakeLab(time=time, rise=rise, spots=spots)))
    assert found.label == "pure bf16 + attn fp32" and found.policy.modules == (("attn", "fp32"),)
    (change,) = found.changes
    assert change.why == "local error 0.3, 0.4 bits of headroom; costs 0.2 ms"


def test_exceptions_that_are_not_needed_are_dropped() -> None:
    spots = [spot("softmax", "a", error=0.9), spot("matmul", "b", error=0.8)]

    def rise(policy: hs.Policy) -> float:
        return 0.0 if ("b", "fp32") in policy.modules or policy.params == "fp32" else 0.5

    lab = FakeLab(time=lambda p, c: PRESET_TIMES[p.name] + 0.02 * len(p.modules), rise=rise, spots=spots)
    search = searched(lab)
    assert best(search).policy.modules == (("b", "fp32"),) and "pure bf16 + a fp32, b fp32" in search.tried


def test_a_scale_that_begins_too_high_gets_a_rule_that_begins_low() -> None:
    def skipped(policy: hs.Policy) -> int:
        return 3 if policy.dtype == "fp16" and policy.scale != "megengine" else 0

    lab = FakeLab(time=preset_time, rise=lambda p: 0.5 if skipped(p) else 0.0, skipped=skipped)
    found = best(searched(lab, dtypes=("fp16",)))
    assert found.policy.scale == "megengine" and found.policy.dtype == "fp16"
    assert found.changes[0].why.startswith("3 steps skipped until the scale fits; ")


def right(policy: hs.Policy) -> float:
    return 0.01 if ("matmul", "fp32") in policy.ops else 0.8


def test_gradients_that_are_far_off_get_exceptions_though_the_loss_is_within_the_bound() -> None:
    lab = FakeLab(time=lambda p, c: PRESET_TIMES[p.name] + 0.02 * len(p.ops), spots=[spot("matmul")], error=right)
    search = searched(lab)
    assert best(search).label == "pure bf16 + matmul fp32"
    assert [label for label, _ in search.proofs] == [best(search).label]
    (plain,) = (tried for tried in search.measured() if tried.label == "pure bf16")
    assert (plain.verdict, plain.reason) == ("worse", "its gradients are off by 80 %")
    assert lab.trained == [best(search).label]


def test_without_an_exception_that_helps_the_proof_decides() -> None:
    lab = FakeLab(time=preset_time, error=right)
    assert best(searched(lab)).label == "pure bf16"
    undecided = FakeLab(time=preset_time, error=right, proofs=lambda c: proof("undecided", 3))
    assert best(searched(undecided)).label == "O0"


def test_an_overflow_is_more_sensitive_than_any_error() -> None:
    spots = [spot("softmax", "a", error=0.9), spot("matmul", "b", error=0.0, overflows=True)]

    def rise(policy: hs.Policy) -> float:
        return 0.0 if ("b", "fp32") in policy.modules or policy.params == "fp32" else math.inf

    lab = FakeLab(time=lambda p, c: PRESET_TIMES[p.name] + 0.01 * len(p.modules), rise=rise, spots=spots)
    found = best(searched(lab))
    assert found.policy.modules == (("b", "fp32"),) and found.changes[0].why.startswith("overflows")


def saving_time(policy: hs.Policy, compile: bool) -> float:
    """Two rules save on top of any preset, one costs."""
    rules = dict(policy.ops)
    saved = 0.9 if rules.get("layer_norm") == "fp32" else 1.0
    saved *= 0.95 if rules.get("gelu") == "keep" else 1.0
    saved *= 1.3 if rules.get("linear") == "fp32" else 1.0
    return preset_time(policy) * saved


SAVING = [
    spot("linear", "up"), spot("layer_norm", "norm", kind="LayerNorm"),
    spot("gelu", "act", kind="GELU", format="fp32", error=0.0),
]  # fmt: skip


def test_changes_that_save_are_found_one_by_one_and_taken_together() -> None:
    lab = FakeLab(time=saving_time, spots=SAVING)
    search = searched(lab)
    found = best(search)
    assert set(found.policy.ops) == {("layer_norm", "fp32"), ("gelu", "keep")} and found.preset == "pure"
    assert found.time is not None and found.time.median == pytest.approx(0.69 * 0.9 * 0.95)
    assert found.predicted == pytest.approx(0.69 * 0.9 * 0.95)
    assert [c.why.partition("; ")[2] for c in found.changes] == ["saves 0.69 ms", "saves 0.34 ms"]
    slow = [x for x in lab.raced if x in search.tried and ("linear", "fp32") in search[x].policy.ops]
    assert slow == ["pure bf16 + linear fp32"]  # not again beside the better one
    rejected = search["pure bf16 + linear fp32"]
    assert rejected.verdict == "slower" and "1.300 of pure bf16's time" in rejected.reason


def test_changes_that_save_and_harm_are_not_taken() -> None:
    lab = FakeLab(time=saving_time, spots=SAVING, rise=lambda p: 0.5 if ("gelu", "keep") in p.ops else 0.0)
    assert best(searched(lab)).policy.ops == (("layer_norm", "fp32"),)


def test_a_candidate_that_fails_is_noted_and_the_search_goes_on() -> None:
    failing = lambda p: "OutOfMemoryError: no memory" if p.name == "pure" else ""  # noqa: E731
    search = searched(FakeLab(time=preset_time, failing=failing))
    assert search["pure bf16"].verdict == "failed" and "no memory" in search["pure bf16"].reason
    assert best(search).label == "O2 bf16"


@pytest.mark.parametrize("verdict", ["worse", "diverged"])
def test_where_the_proof_fails_the_next_one_is_tested(verdict: str) -> None:
    lab = FakeLab(time=preset_time, proofs=lambda c: proof(verdict if c.label == "pure bf16" else "equivalent"))
    search = searched(lab)
    assert [(label, found.verdict) for label, found in search.proofs] == [
        ("pure bf16", verdict), ("O2 bf16", "equivalent"),
    ]  # fmt: skip
    assert best(search).label == "O2 bf16" and search["pure bf16"].verdict == "worse"


def test_where_nothing_is_decided_the_best_preset_is_taken_and_not_a_changed_one() -> None:
    search = searched(FakeLab(time=saving_time, spots=SAVING, proofs=lambda c: proof("undecided", 7)))
    assert best(search).label == "pure bf16" and not best(search).changes
    assert "needs 7 more seeds" in search.reason(search.proofs[-1][1])


def test_where_all_proofs_fail_it_stays_in_fp32() -> None:
    search = searched(FakeLab(time=preset_time, proofs=lambda c: proof("worse")))
    assert best(search).label == "O0"


def test_a_slow_candidate_leaves_only_where_time_alone_counts() -> None:
    slow = lambda p, c: 2.0 if p.name == "lean" else 1.0  # noqa: E731
    assert searched(FakeLab(time=slow))["lean bf16"].verdict == "slower"
    lab = FakeLab(time=slow, size=lambda p: 300 if p.name == "lean" else 1000)
    assert best(searched(lab, MEMORY)).label == "lean bf16"
    assert best(searched(lab, Weights(time=0.9, memory=0.1))).label == "O0"


def test_compiled_steps_are_candidates_too() -> None:
    search = searched(FakeLab(time=lambda p, c: 0.5 if c else preset_time(p)), compile=True)
    assert best(search).compile and best(search).preset in {"O0", "pure"}
    assert not any("compiled" in label for label in searched(FakeLab(time=preset_time)).tried)


def test_a_proven_choice_is_there_before_anything_is_compiled_and_an_interruption_keeps_it() -> None:
    lab = FakeLab(time=lambda p, c: 0.5 if c else preset_time(p))
    search = Search(lab, TIME, 40, bound=0.01, dtypes=("bf16",), seeds=0, compile=True)  # type: ignore[arg-type]
    seen: list[tuple[str, bool]] = []

    def stop() -> None:
        seen.append((search.best, any("compiled" in label for label in lab.raced)))
        raise KeyboardInterrupt

    search.on_choice = stop
    with pytest.raises(KeyboardInterrupt):
        search.run(REFERENCE)
    search.fall_back()
    assert seen == [("pure bf16", False)] and search.best == "pure bf16" and search.proofs[-1][1].holds


def test_without_time_it_is_fp32_and_what_is_missing_is_said() -> None:
    search = searched(FakeLab(time=preset_time, left=0.0), compile=True)
    assert best(search).label == "O0" and not search.finished
    assert "too short for the presets" in search.notes[0] and "more minutes are needed" in search.notes[0]


def test_a_model_that_differs_from_run_to_run_is_noted() -> None:
    search = searched(FakeLab(time=preset_time, repeatable=False))
    assert "differ" in search.notes[0]


def test_equal_measurements_give_the_same_search() -> None:
    def made() -> tuple[Any, ...]:
        lab = FakeLab(time=saving_time, spots=SAVING)
        search = searched(lab)
        return best(search), lab.raced, lab.said

    assert made() == made()


def test_formats_are_raced_side_by_side() -> None:
    lab = FakeLab(time=lambda p, c: preset_time(p) * (0.9 if p.dtype == "fp16" else 1.0))
    assert best(searched(lab, dtypes=("bf16", "fp16"))).label == "pure fp16"
