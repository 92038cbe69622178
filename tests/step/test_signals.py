"""Signals wait for the end of a critical part, and then reach the handler they were meant for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from halfstep.update.updater import Deferral

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (INT, TERM)}
    signal.signal(INT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    critical, done = Deferral(), []
    with pytest.raises(KeyboardInterrupt), critical:
        signal.raise_signal(INT)
        done.append("the block")
    assert done == ["the block"]
    assert signal.getsignal(INT) is signal.default_int_handler
    with critical:  # and nothing is left of it
        done.append("again")
    assert done == ["the block", "again"]


def test_a_second_one_of_the_same_number_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Deferral():
        signal.raise_signal(INT)
        done.append(1)
        signal.raise_signal(INT)
        done.append(2)
    assert done == [1]
    assert signal.getsignal(INT) is signal.default_int_handler


def test_every_handler_of_the_users_is_called_with_its_signal_also_if_one_raises() -> None:
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if number == INT:
            raise SystemExit(3)

    signal.signal(INT, note)
    signal.signal(TERM, note)
    with pytest.raises(SystemExit), Deferral():
        signal.raise_signal(INT)
        signal.raise_signal(TERM)
        assert seen == []
    assert seen == [INT, TERM]
    assert signal.getsignal(INT) is note and signal.getsignal(TERM) is note


def test_an_exception_of_the_block_is_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, Deferral():
        signal.raise_signal(INT)
        raise MemoryError
    assert isinstance(caught.value.__context__, MemoryError)


def test_what_has_no_handler_in_python_is_left_alone() -> None:
    signal.signal(INT, signal.SIG_IGN)
    with Deferral():
        assert signal.getsignal(INT) is signal.SIG_IGN
        assert signal.getsignal(TERM) is signal.SIG_DFL


def test_it_does_nothing_in_other_threads() -> None:
    found: list[Any] = []

    def inside() -> None:
        with Deferral():
            found.append(signal.getsignal(INT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_blocks_nest_and_a_handler_set_inside_stays() -> None:
    outer, inner = Deferral(), Deferral()

    def own(number: int, frame: FrameType | None) -> None: ...

    with pytest.raises(KeyboardInterrupt), outer:
        with inner:
            signal.raise_signal(INT)
        assert signal.getsignal(INT) != signal.default_int_handler  # the outer one still waits
    with outer:
        signal.signal(INT, own)
    assert signal.getsignal(INT) is own


def test_what_is_left_behind_passes_signals_on_and_goes_away() -> None:
    critical = Deferral()
    critical.__enter__()
    critical._on = False  # as an exception in the middle of entering or leaving leaves it
    assert signal.getsignal(INT) != signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INT)
    assert signal.getsignal(INT) is signal.default_int_handler
    critical.__enter__()
    critical._on = False
    with pytest.raises(KeyboardInterrupt), critical:
        signal.raise_signal(INT)
    assert signal.getsignal(INT) is signal.default_int_handler
