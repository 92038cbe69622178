"""Timing in turns: rounds pair what belongs together; an interval is never empty."""

from __future__ import annotations

import math
import random

import pytest

from halfstep.timing import WARM_UP, Race, Unfit, paired_ratio, ratio_of, timed


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 30, 301])
def test_an_interval_holds_its_median_however_few_rounds_there_are(count: int) -> None:
    source = random.Random(count)
    found = paired_ratio([source.lognormvariate(0.0, 0.5) for _ in range(count)], [1.0] * count)
    assert found.low <= found.median <= found.high and found.rounds == count
    assert found.resolution == max(abs(found.low - 1.0), abs(found.high - 1.0))


def test_without_a_round_there_is_no_ratio() -> None:
    with pytest.raises(ValueError, match="no round in which both were timed; time at least one"):
        paired_ratio([], [])
    assert ratio_of({1: 2.0}, {2: 1.0}) is None
    race = Race(lambda name, number: 1.0)
    assert race.ratio("a", "b") is None and math.isnan(race.typical("a"))


def test_only_times_of_the_same_round_are_paired() -> None:
    found = ratio_of({1: 2.0, 2: 40.0, 3: 1.0}, {1: 1.0, 2: 20.0})
    assert found is not None and (found.median, found.rounds) == (2.0, 2)
    more = ratio_of({1: 2.0}, {1: 1.0}, plus=1.0)
    assert more is not None and more.median == 1.0


def test_every_candidate_runs_once_a_round_and_the_first_rounds_are_not_timed() -> None:
    called: list[tuple[int, str]] = []
    now = [0.0]

    def measure(name: str, number: int) -> float:
        called.append((number, name))
        now[0] += 1.0
        return 1.0 if name == "a" else 0.5 if number >= WARM_UP else 100.0

    race = Race(measure)
    shares: list[float] = []
    race.run(["a", "b"], seconds=8.0, least=2, most=50, clock=lambda: now[0], on_share=shares.append)
    rounds = WARM_UP + 4
    assert sorted(called) == [(number, name) for number in range(rounds) for name in "ab"]
    assert len({tuple(name for n, name in called if n == number) for number in range(rounds)}) == 2  # shuffled
    found = race.ratio("b", "a")
    assert found is not None and (found.median, found.high, found.rounds) == (0.5, 0.5, 4)
    assert shares == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_least_rounds_are_made_without_time_and_the_most_end_it() -> None:
    race = Race(lambda name, number: 1.0)
    race.run(["a"], seconds=0.0, least=5, most=9)
    assert len(race.times["a"]) == 5
    race = Race(lambda name, number: 1.0)
    race.run(["a"], seconds=1e9, least=5, most=9)
    assert len(race.times["a"]) == 9


def test_what_is_unfit_leaves_with_its_reason_and_the_others_go_on() -> None:
    def measure(name: str, number: int) -> float:
        if name == "b" and number == 1:
            raise Unfit("out of memory")
        return 1.0

    race = Race(measure)
    for number in range(3):
        race.round(["a", "b"], number)
    assert race.dropped == {"b": "out of memory"}
    assert (list(race.times["a"]), list(race.times["b"])) == ([0, 1, 2], [0])


def test_a_call_is_timed_by_the_clock_that_is_given() -> None:
    now = iter([3.0, 5.5])
    assert timed(lambda: None, "cpu", lambda: next(now)) == 2.5
