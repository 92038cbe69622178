"""A fixed sample of every fuzzer's programs; `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import pytest

from tests.fuzz.fuzzers import FUZZERS, checker, sample


@pytest.mark.parametrize("name", FUZZERS)
def test_programs_of_the_sample_behave(name: str) -> None:
    check = checker(name)
    problems = {seed: problem for seed in sample(name) if (problem := check(seed))}
    assert not problems
