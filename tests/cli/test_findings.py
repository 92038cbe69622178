from __future__ import annotations

import dataclasses

from halfstep.cli.comparison import findings
from halfstep.report import Fact
from halfstep.timing import Ratio
from tests.cli.small_comparison import FAST, SAME, SLOW, comparison, row

SAFE = (97.0, 97.1, 96.9, 97.0, 97.0)
WILD = (97.0, 99.0, 95.0, 98.0, 96.0)
BAD = (90.0, 90.1, 89.9, 90.0, 90.0)


def words(fact: Fact) -> str:
    return " ".join([fact.text, *fact.more])


def test_what_stayed_within_the_margin_and_what_did_not_is_said_by_name() -> None:
    rows = (row("a", SAFE, FAST, FAST), row("b", WILD, SAME, SAME), row("c", BAD, SAME, SAME))
    result, _, _ = findings(comparison(5, *rows, row("d", (float("nan"),) * 5, SAME, SAME)))
    assert result.heading == "Result (accuracy, %)" and result.tone == "bad"
    assert result.text == "2 of 5 end within the margin of 1 %: torch.amp bf16 and a."
    assert result.more[:3] == (
        "Worse than fp32: c.",
        "Diverged: d.",
        "Undecided, the interval crosses the margin: b.",
    )
    assert result.more[3].startswith("Skipped steps whose gradients overflowed: torch.amp bf16")


def test_all_within_the_margin_is_one_sentence() -> None:
    result, _, _ = findings(comparison(5, row("a", SAFE, FAST, FAST, skipped=(0,) * 5)))
    assert (result.text, result.tone) == ("All 2 end within the margin of 1 %.", "good")


def test_one_seed_decides_nothing() -> None:
    result, _, _ = findings(comparison(1))
    assert (result.text, result.tone) == ("Undecided: one seed has no interval.", "open")


def test_the_fastest_is_named_with_its_interval_and_what_cannot_be_told_from_it() -> None:
    near = Ratio(median=0.705, low=0.70, high=0.72, rounds=100)
    _, time, _ = findings(comparison(5, row("a", SAFE, FAST, FAST), row("b", SAFE, near, near)))
    assert (time.text, time.tone) == ("Fastest: a, 0.70 [0.69, 0.71] of fp32's time.", "good")
    assert time.more == (
        "Cannot be told from it: b.",
        "Against torch.amp bf16: 0.70.",
        "torch.amp bf16: undecided (1.01 [1.00, 1.01]).",
    )


def test_a_fast_policy_that_spoilt_the_result_is_not_recommended() -> None:
    half = Ratio(median=0.5, low=0.49, high=0.51, rounds=100)
    _, time, memory = findings(comparison(5, row("a", SAFE, FAST, FAST), row("b", BAD, half, half, saved_bytes=500)))
    assert time.text.startswith("Fastest: b,")
    assert "Its result is worse. First within the margin: a." in time.more
    assert "Its result is worse. First within the margin: torch.amp bf16." in memory.more


def test_what_the_machine_cannot_resolve_is_undecided() -> None:
    _, time, _ = findings(comparison(5, row("a", SAFE, SAME, SAME)))
    assert time.tone == "open" and time.text.startswith("Undecided: torch.amp bf16 comes first with 1.01")


def test_when_nothing_is_faster_than_fp32_that_is_said() -> None:
    slow = comparison(5, row("a", SAFE, SLOW, SLOW))
    amp = dataclasses.replace(slow.rows[1], to_fp32=Ratio(median=1.2, low=1.19, high=1.21, rounds=100))
    _, time, _ = findings(dataclasses.replace(slow, rows=(slow.rows[0], amp, slow.rows[2])))
    assert time.text == "fp32 is fastest. The nearest low format is torch.amp bf16: 1.20 [1.19, 1.21] of fp32's time."


def test_without_times_nothing_is_said_about_speed() -> None:
    rows = tuple(dataclasses.replace(r, to_fp32=None, to_amp=None) for r in comparison(5).rows)
    _, time, _ = findings(comparison(5, control=None, rows=rows))
    assert time.text == "Not measured: a run is too short for more than its warm-up."


def test_memory_names_the_smallest_and_what_masters_cost() -> None:
    rows = (
        row("a", SAFE, FAST, FAST, saved_bytes=560),
        row("b", SAFE, FAST, FAST, saved_bytes=562, state_bytes=3_750_000),
        row("c", SAFE, FAST, FAST, saved_bytes=700, state_bytes=2_500_100),
    )
    _, _, memory = findings(comparison(5, *rows))
    assert memory.text == "Least saved for backward: a and b, 0.56 kB (44 % less than fp32)."
    assert memory.more == ("Between steps 50 % more than fp32: b, 3.75 MB.",)
    _, _, same = findings(comparison(5))
    assert same.text == "None saves less for backward than fp32's 1.00 kB." and same.tone == "open"
    assert "Between steps all hold as much as fp32." in words(same)
