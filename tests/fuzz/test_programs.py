"""The fuzzer of programs finds faults that are put in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from halfstep.cast.regions import autocast as region
from halfstep.cast.regions import recompute
from tests.fuzz import oracle, programs


def findings(seeds: range) -> Iterator[str]:
    return filter(None, map(programs.check, seeds))


def test_a_recomputation_without_rules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "rules_on", lambda mode, bound: contextlib.nullcontext())
    assert any("with and without checkpoints" in problem for problem in findings(range(40)))


def test_a_format_that_is_not_torchs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "get_autocast_dtype", lambda device: torch.bfloat16)
    assert any("halfstep, torch.autocast" in problem for problem in findings(range(120)))


def test_the_oracle_finds_a_result_that_was_rounded_to_bf16_besides() -> None:
    exact = torch.linspace(0.1, 3, 100, dtype=torch.float64)
    nothing = torch.zeros_like(exact)
    assert not oracle._beyond(exact.half().double(), exact, nothing)
    assert "exactly" in oracle._beyond(exact.bfloat16().half().double(), exact, nothing)
