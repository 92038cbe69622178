"""What ranks post through a store: complete, bounded in time, and decided alike. Ranks are threads here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from halfstep.lens.box.exchange import KEPT, LESS, MOST_VALUES, Exchange

LONG = 30.0  # seconds, which no test waits


def together(count: int, work: Callable[[Exchange], Any], store: Store | None = None) -> list[Any]:
    """Return what `work` returns on each of so many ranks, numbered 10, 11 and so on."""
    shared: Any = HashStore() if store is None else store
    ranks = tuple(range(10, 10 + count))
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda rank: work(Exchange(shared, ranks, rank)), ranks))


@pytest.mark.parametrize("count", [2, 3, 62, 63, 125])
def test_every_rank_reads_what_some_have_reported(count: int) -> None:
    guilty = {10, 9 + count}

    def work(exchange: Exchange) -> Any:
        exchange.post("step", bytes([exchange.me % 256]) if exchange.me in guilty else None)
        return exchange.collect("step", LONG)

    for answers in together(count, work):
        assert answers == ({rank: bytes([rank % 256]) for rank in guilty}, ())


def test_what_many_report_is_cut_off_alike_on_all_ranks() -> None:
    def work(exchange: Exchange) -> Any:
        exchange.post("step", b"1")
        return tuple(exchange.collect("step", LONG)[0])

    (found,) = set(together(2 * MOST_VALUES, work))
    assert len(found) == MOST_VALUES


@pytest.mark.parametrize("count", [2, 64, 130])
def test_missing_ranks_are_named_when_the_time_is_over_and_waited_for_less_until_they_come_back(count: int) -> None:
    store, ranks = HashStore(), tuple(range(count))
    here = Exchange(store, ranks, 0)
    others = [Exchange(store, ranks, rank) for rank in ranks[1:]]

    def waited(topic: str, *coming: Exchange) -> tuple[float, tuple[int, ...]]:
        for other in coming:
            other.post(topic)
        here.post(topic)
        began = time.monotonic()
        missing = here.collect(topic, 0.5)[1]
        return time.monotonic() - began, missing

    assert waited("1", *others)[1] == ()
    took, missing = waited("2", *others[:-1])
    assert took >= 0.5 and missing == (count - 1,)
    took, missing = waited("3", *others[:-1])
    assert 0.5 / LESS <= took < 0.5 and missing == (count - 1,)
    others[-1].post("3")  # late
    took, missing = waited("4", *others[:-1])
    assert took >= 0.5 and missing == (count - 1,)


def test_the_first_report_is_enough_where_that_is_asked_for() -> None:
    ranks = (0, 1, 2)
    store = HashStore()
    exchanges = [Exchange(store, ranks, rank) for rank in ranks]
    exchanges[0].post("step")
    exchanges[1].post("step", b"yes")
    assert exchanges[0].collect("step", LONG, one=True)[0] == {1: b"yes"}


def test_all_ranks_decide_alike_whoever_comes_late_or_not_at_all() -> None:
    """The deadline of some passes while others are still coming: a hang of a collective, if they differed."""
    draw = random.Random(0)
    seen = set()
    for trial in range(150):
        delays = [draw.choice((0.0, 0.004, 0.008)) for _ in range(3)]

        def work(exchange: Exchange, trial: int = trial, delays: list[float] = delays) -> bool:
            time.sleep(delays[exchange.me - 10])
            return exchange.agree("step", ok=trial % 5 > 0, patience=0.004)

        (decision,) = set(together(3, work))
        seen.add(decision)
        assert not (decision and trial % 5 == 0)
    assert seen == {True, False}


def test_one_rank_that_does_not_agree_stops_all_at_once() -> None:
    began = time.monotonic()
    assert set(together(4, lambda e: e.agree("step", ok=e.me != 12, patience=LONG))) == {False}
    assert set(together(4, lambda e: e.agree("step", ok=True, patience=LONG))) == {True}
    assert time.monotonic() - began < LONG


def test_the_store_keeps_the_keys_of_a_bounded_number_of_topics() -> None:
    store = HashStore()
    first, second = (Exchange(store, (0, 1), rank) for rank in (0, 1))
    sizes = []
    for step in range(3 * KEPT):
        for exchange in (first, second):
            exchange.post(f"{step}", b"1")
        assert set(first.collect(f"{step}", LONG)[0]) == {0, 1}
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda e, s=step: e.agree(f"{s}/update", ok=True, patience=LONG), (first, second)))
        sizes.append(store.num_keys())
    assert max(sizes) == sizes[KEPT] == sizes[-1]
