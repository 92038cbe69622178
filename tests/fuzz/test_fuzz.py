"""A fixed sample of every fuzzer's programs; `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import pytest

from tests.fuzz.arguments import ENTRIES, missing, refused
from tests.fuzz.fuzzers import FUZZERS, checker, sample


def problems(name: str, seeds: range) -> dict[int, str]:
    check = checker(name)
    return {seed: problem for seed in seeds if (problem := check(seed))}


@pytest.mark.parametrize(  # that of contents starts a process
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "contents" else name for name in FUZZERS]
)
def test_the_first_programs_of_the_sample_behave(name: str) -> None:
    assert not problems(name, sample(name)[: len(sample(name)) // 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_the_other_programs_of_the_sample_behave(name: str) -> None:
    assert not problems(name, sample(name)[len(sample(name)) // 2 :])


def test_every_public_entry_has_arguments_and_takes_those_that_are_right() -> None:
    assert not missing()
    elsewhere = {"hs.shard", "hs.lens.replay", "hs.exported", "hs.tune", "hs.plan"}  # in tests of their own
    assert not [problem for name in ENTRIES if name not in elsewhere and (problem := refused(name))]
