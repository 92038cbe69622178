"""A race drops candidates as their paired ratios show it, and ties go to the preferred one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from halfstep.auto.choose import MARGIN, Elimination
from halfstep.timing import Unfit


def raced(seconds: dict[str, float | Callable[[int], float]], *, most: int = 60) -> Elimination:
    """Return a race, over, of candidates that take so long; one that is a function of the round may raise."""
    turns = []

    def measure(name: str, number: int) -> float:
        turns.append(name)
        taken = seconds[name]
        return taken(number) if callable(taken) else taken

    race = Elimination(measure)
    race.eliminate(list(seconds), most)
    assert len(turns) == race.turns <= most or race.rounds == 1
    return race


def noisy(median: float, spread: float, seed: int) -> Callable[[int], float]:
    source = random.Random(seed)
    return lambda _: median * (1.0 + source.uniform(-spread, spread))


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"fp32": 1.0}, "fp32"),
        ({"fp32": 1.0, "mixed": 1.0, "pure": 1.0}, "fp32"),
        ({"fp32": 1.0, "mixed": 1.0 - MARGIN / 2}, "fp32"),  # not worth it
        ({"fp32": 1.0, "mixed": 1.0 - 2 * MARGIN}, "mixed"),
        ({"fp32": 1.0, "mixed": 0.5, "pure": 0.499}, "mixed"),
        ({"fp32": 1.0, "mixed": 0.5, "pure": 0.4}, "pure"),
        ({"fp32": 0.4, "mixed": 0.5, "pure": 1.0}, "fp32"),
    ],
)
def test_the_fastest_wins_and_ties_go_to_the_preferred(seconds: dict[str, float], best: str) -> None:
    race = raced(dict(seconds))
    assert race.best() == best
    assert race.names == [best]
    assert race.rounds <= 5


def test_what_is_much_slower_runs_once_and_what_is_close_runs_on() -> None:
    race = raced({"fp32": 11.0, "mixed": noisy(1.0, 0.05, 1), "pure": noisy(0.985, 0.05, 2)}, most=25)
    assert len(race.times["fp32"]) == 1
    assert race.rounds == 12
    assert race.names == ["mixed", "pure"]
    assert race.best() == "mixed"  # the gain is small, and not certain


def test_of_more_than_two_the_slowest_leaves_after_each_round() -> None:
    near = {"fp32": 1.02, "mixed": 1.0, "O2": 0.995, "pure": 1.01}
    race = raced({name: noisy(1.0, 0.001, n) for n, name in enumerate(near)} | dict(near), most=4 + 3 + 2)
    assert [len(race.times[name]) for name in near] == [1, 3, 3, 2]
    assert race.best() == "mixed"


def test_what_is_likely_to_be_clearly_faster_is_chosen_when_the_turns_are_over() -> None:
    busy = [0.7, 1.4, 0.75, 0.8, 0.78]  # of one round in five something else ran
    race = raced({"mixed": 1.0, "O2": lambda number: busy[number]}, most=10)
    assert race.faster("O2", "mixed") is None
    assert race.best() == "O2"
    race = raced({"mixed": lambda number: 0.7 if number == 3 else 1.0, "O2": lambda number: busy[number]}, most=10)
    assert race.best() == "mixed"  # which was disturbed in the other rounds


def test_equal_ones_with_little_noise_do_not_run_to_the_end() -> None:
    race = raced({"O2": noisy(1.0, 0.004, 1), "pure": noisy(0.999, 0.004, 2)})
    assert race.best() == "O2"
    assert race.names == ["O2"]
    assert race.rounds < 15


def test_noise_does_not_choose_and_a_gain_beyond_it_does() -> None:
    twins = [raced({"fp32": noisy(1, 0.1, 2 * n), "mixed": noisy(1, 0.1, 2 * n + 1)}).best() for n in range(40)]
    gains = [raced({"fp32": noisy(1, 0.1, 2 * n), "mixed": noisy(0.85, 0.1, 2 * n + 1)}).best() for n in range(40)]
    assert twins.count("mixed") <= 4
    assert gains.count("mixed") >= 36


def test_times_are_compared_within_a_round() -> None:
    def drifting(share: float) -> Callable[[int], float]:
        return lambda number: share * (1.0 + number)  # the machine slows down

    assert raced({"fp32": drifting(1.0), "mixed": drifting(0.95)}).best() == "mixed"


def test_what_is_unfit_is_dropped_with_its_reason() -> None:
    def fails(number: int) -> float:
        if number == 1:
            raise Unfit("out of memory")
        return 1.0

    race = raced({"fp32": fails, "mixed": 0.97}, most=8)
    assert race.dropped == {"fp32": "out of memory"}
    assert (race.best(), race.names) == ("mixed", ["mixed"])


def test_nothing_is_left_if_all_are_unfit() -> None:
    def fails(_: int) -> float:
        raise Unfit("no")

    race = raced({"fp32": fails, "mixed": fails})
    assert (race.best(), race.names, race.rounds) == ("", [], 1)


def test_no_round_begins_that_would_pass_the_most_turns() -> None:
    close = {"fp32": noisy(1.0, 0.2, 1), "mixed": noisy(0.98, 0.2, 2)}
    assert raced(dict(close), most=14).rounds == 7
    assert raced(dict(close), most=13).rounds == 6
    assert raced(dict(close), most=1).rounds == 1


def test_a_later_one_is_compared_in_the_rounds_that_both_ran() -> None:
    race = raced({"fp32": 1.0, "mixed": 2.0})
    seconds = {"fp32": 1.0, "fp32 compiled": 0.5}
    race._measure = lambda name, number: seconds[name]
    race.eliminate(["fp32", "fp32 compiled"], 100)
    assert race.best() == "fp32 compiled"
    ratio = race.ratio("fp32 compiled", "fp32")
    assert ratio is not None
    assert ratio.median == 0.5
    assert race.ratio("fp32 compiled", "mixed") is None
    chain = race.over("fp32 compiled", "mixed")
    assert chain is not None
    assert (chain.median, race.over("fp32", "none")) == (0.25, None)
    assert race.typical("fp32 compiled") == 0.5
