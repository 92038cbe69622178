"""The moments of a training step: the order of the calls, and what an exception leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.errors import StepError
from halfstep.step.moments import Moments, Phase

BAD = torch.zeros((), dtype=torch.bool)


class Noting:
    """Notes its calls; `answers` holds what a method raises (an exception class) or returns."""

    def __init__(self, name: str, calls: list[str], **answers: Any) -> None:
        self.name, self.calls, self.answers = name, calls, answers

    def _note(self, moment: str) -> Any:
        self.calls.append(f"{self.name}.{moment}")
        answer = self.answers.get(moment)
        if isinstance(answer, type):
            raise answer(moment)
        return answer

    def begin_window(self) -> None:
        self._note("begin_window")

    def before_update(self) -> None:
        self._note("before_update")

    def after_update(self, bad: Tensor) -> Any:
        assert bad is BAD
        return self._note("after_update")

    def abort(self, *, written: bool) -> None:
        self._note(f"abort {written}")


class Begins:
    """Has one of the four methods."""

    def __init__(self) -> None:
        self.begun = 0

    def begin_window(self) -> None:
        self.begun += 1


def moments_of(calls: list[str], *, written: bool = True, **answers: Any) -> Moments:
    parts = [Noting("a", calls), Noting("b", calls, **answers)]
    return Moments(parts, lambda: written)


def test_parts_are_called_in_order_and_in_reverse_after_the_update() -> None:
    calls: list[str] = []
    moments = moments_of(calls)
    moments.add(Noting("late", calls))
    moments.begin()
    moments.complete()
    moments.update(lambda: calls.append("write"), BAD)
    assert calls == [
        *("a.begin_window", "b.begin_window", "late.begin_window"),
        *("a.before_update", "b.before_update", "late.before_update"),
        "write",
        *("late.after_update", "b.after_update", "a.after_update"),
    ]
    assert moments.phase == Phase.REST


def test_a_part_has_the_methods_it_needs() -> None:
    begins = Begins()
    moments = Moments([begins], lambda: True)
    for call in (moments.begin, moments.complete, moments.cut_off):
        call()
    moments.update(lambda: None, BAD)
    assert begins.begun == 1


def test_a_returned_exception_is_raised_when_the_update_is_complete() -> None:
    calls: list[str] = []
    moments = moments_of(calls, after_update=ValueError("alarm"))
    with pytest.raises(ValueError, match="alarm"):
        moments.update(lambda: None, BAD)
    assert calls == ["b.after_update", "a.after_update"] and moments.phase == Phase.REST
    moments.refuse(1)


def test_an_exception_in_after_update_cuts_the_update_off() -> None:
    calls: list[str] = []
    moments = moments_of(calls, after_update=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError) as caught:
        moments.update(lambda: None, BAD)
    moments.cut_off(caught.value)
    assert calls == ["b.after_update", "b.abort True", "a.abort True"]
    with pytest.raises(StepError, match=r"ZeroDivisionError \(after_update\) cut off the update after 7 micro-batches"):
        moments.refuse(7)
    moments.forget()
    moments.refuse(7)


@pytest.mark.parametrize("phase", [Phase.MICRO_BATCH, Phase.UPDATE])
def test_what_has_not_been_written_is_undone(phase: Phase) -> None:
    calls: list[str] = []
    moments = moments_of(calls, written=False)
    moments.phase = phase
    moments.refuse(0)
    assert calls == ["b.abort False", "a.abort False"] and moments.phase == Phase.REST


def test_an_undo_that_is_cut_off_is_made_again() -> None:
    calls: list[str] = []
    moments = moments_of(calls, written=False, **{"abort False": KeyboardInterrupt})
    moments.phase = Phase.MICRO_BATCH
    with pytest.raises(KeyboardInterrupt):
        moments.cut_off()
    assert moments.phase == Phase.MICRO_BATCH and calls == ["b.abort False"]


def test_a_scheduler_is_restored_before_anything_else_is_refused() -> None:
    restored: list[str] = []

    class Copy:
        def restore(self) -> None:
            restored.append("scheduler")

    moments = moments_of([])
    moments.phase, moments.scheduler = Phase.ADVANCE, Copy()  # type: ignore[assignment]
    moments.refuse(0)
    assert restored == ["scheduler"] and moments.phase == Phase.REST
