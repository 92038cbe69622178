"""A fixed sample of every fuzzer's programs; `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import pytest

from tests.fuzz.arguments import ENTRIES, missing, refused
from tests.fuzz.fuzzers import FUZZERS, checker, sample


@pytest.mark.parametrize("name", FUZZERS)
def test_programs_of_the_sample_behave(name: str) -> None:
    check = checker(name)
    problems = {seed: problem for seed in sample(name) if (problem := check(seed))}
    assert not problems


def test_every_public_entry_has_arguments_and_takes_those_that_are_right() -> None:
    assert not missing()
    elsewhere = {"hs.shard", "hs.lens.replay", "hs.exported", "hs.tune", "hs.plan"}  # in tests of their own
    assert not [problem for name in ENTRIES if name not in elsewhere and (problem := refused(name))]
