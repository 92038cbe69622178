"""The benchmark of forward passes that serve: a case is measured, and its table shows every candidate."""

from __future__ import annotations

import pytest

from benchmarks.cases import CASES
from benchmarks.serving import measure, serving_table


@pytest.mark.slow
def test_a_case_is_measured_and_what_serves_has_the_bits_of_its_policy() -> None:
    case = measure(CASES["lenet5"], rounds=6)
    rows = case["rows"]
    for label in ("pure, lowered", "mixed, exported", "O2, exported"):
        assert rows[label]["to_policy"] == 0 and rows[label]["weights_bytes"] < 0.6 * rows["fp32"]["weights_bytes"]
    assert all(row["ms"] > 0 and row["forward_bytes"] > 0 for row in rows.values()) and rows["fp32"]["to_fp32"] == 0
    text = serving_table({"quick": True, "cases": {"lenet5": case}})
    assert text.count("equal bits") == 3 and "Few rounds" in text and all(f"`{label}`" in text for label in rows)


def test_nothing_measured_is_said_so() -> None:
    assert serving_table({}) == "Not measured here."
