"""Sentences of docs/performance.md: one whose number changes sides is an error, not a wrong sentence."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from benchmarks.conclusions import Turned, conclusion_blocks
from benchmarks.reports import committed


@pytest.mark.parametrize(
    ("case", "label", "value"), [("mlp21m", "pure", 1.02), ("lenet5", "mixed compiled", 0.97), ("lenet5", "fp32", 1.01)]
)
def test_a_number_that_changes_sides_is_an_error(case: str, label: str, value: float) -> None:
    reports = committed()
    assert conclusion_blocks(reports)
    changed = copy.deepcopy(reports.cpu)
    changed["cases"][case]["rows"][label]["to_amp"]["median"] = value
    with pytest.raises(Turned, match=r"move the sentence"):
        conclusion_blocks(replace(reports, cpu=changed))
