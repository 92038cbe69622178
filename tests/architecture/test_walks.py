"""The walks through the package stay within their limits (`make walks`)."""

from __future__ import annotations

import pytest

from tests.architecture.walks import LIMITS, WALKS, Walk, counted, walk


@pytest.mark.filterwarnings("ignore")  # of a loss that is not finite
@pytest.mark.parametrize("name", list(WALKS))
def test_a_walk_stays_within_its_limits(name: str) -> None:
    taken = counted(name)
    limit = LIMITS[name]
    assert len(taken.files) <= limit.files, taken.files
    assert limit.switches is None or taken.switches <= limit.switches


def test_a_walk_counts_files_functions_and_switches() -> None:
    taken = Walk((("a.py", "f"), ("a.py", "g"), ("b.py", "h"), ("a.py", "f")))
    assert (taken.files, taken.functions, taken.switches) == (["a.py", "b.py"], 3, 2)


def test_only_calls_of_the_package_count() -> None:
    from halfstep.policy import Policy

    assert walk(lambda: sorted([3, 1])).calls == ()
    assert "policy/policy.py" in walk(lambda: Policy.of("mixed", dtype="bf16")).files
