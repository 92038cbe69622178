"""The benchmark of policy="auto": a case is measured, and its table has a row for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.auto import auto_table, measure
from benchmarks.cases import CASES


@pytest.mark.hours
@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_case_is_measured(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, mode=None, **options: real(f, **{**options, "backend": "eager"}))
    case = measure(replace(CASES["chain10"], dtype=dtype), 0.0, 3)
    others = {"fp32", "torch.amp", "torch.amp compiled"} | ({"torch.amp bf16"} if dtype == "fp16" else set())
    assert {"fp32"} <= set(case["auto_to"]) <= others
    assert case["to_best"] == max(case["auto_to"].values(), key=lambda one: one["median"])
    text = auto_table({"quick": True, "cases": {"chain10": case}})
    assert "Few rounds" in text
    assert "| 10 tiny tensors, " in text


def test_the_goal_is_counted_and_nothing_measured_is_said_so() -> None:
    one = {"median": 1.019, "low": 1.0, "high": 1.03}
    choice = {"policy": "O0", "compiled": True, "seconds": 2.0, "calls": 30}
    case = {"title": "A net", "dtype": "bf16", "choice": choice, "best": "fp32", "to_best": one, "control": one}
    text = auto_table({"quick": False, "cases": {"a": case, "b": {**case, "to_best": {**one, "median": 1.021}}}})
    assert "| A net, bf16 | fp32, compiled | 2.0 s, 30 calls | fp32 | 1.019 [1.000, 1.030] |" in text
    assert "In 1 of 2 cases it is at most 2% slower" in text
    assert auto_table({}) == "Not measured here."
