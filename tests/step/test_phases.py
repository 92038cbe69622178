"""The phases of a step in a trace of torch.profiler, and nothing of them when no profiler runs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from halfstep.step.train_step import PHASES

NAMES = ("halfstep::forward", "halfstep::backward", "halfstep::tail")


def make(**options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = hs.Policy.of("mixed", dtype="bf16")
    return hs.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), policy=policy, **options)


def trace(step: hs.TrainStep, calls: int) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            step(torch.ones(3, 4))
    return sorted(profiler.events(), key=lambda event: event.time_range.start)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trace_has_the_phases_in_their_order_with_their_operators_in_them(accumulate: int) -> None:
    events = trace(make(accumulate=accumulate), 4)
    phases = [event for event in events if event.name in NAMES]
    window = [*NAMES[:2] * accumulate, NAMES[2]]
    assert [event.name for event in phases] == window * (4 // accumulate)

    def within(name: str, phase: Any) -> bool:
        inside = (e for e in events if phase.time_range.start <= e.time_range.start <= phase.time_range.end)
        return any(name in e.name for e in inside)

    forward, backward, tail = phases[0], phases[1], next(e for e in phases if e.name == NAMES[2])
    assert within("aten::linear", forward) and not within("aten::linear", tail)
    assert within("Backward0", backward) and within("halfstep::adam_", tail)


def test_without_a_profiler_a_step_is_as_it_was_and_its_bits_are_the_same() -> None:
    step, other = make(), make()
    trace(step, 2)
    for _ in range(2):
        other(torch.ones(3, 4))
    assert PHASES.keys() <= vars(step).keys()
    step(torch.ones(3, 4))
    other(torch.ones(3, 4))
    assert not PHASES.keys() & (vars(step).keys() | vars(other).keys())
    wanted = other.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in step.model.state_dict().items())


def test_an_error_in_a_phase_comes_through_and_the_next_trace_is_whole() -> None:
    step = make()
    with pytest.raises(RuntimeError), profile(activities=[ProfilerActivity.CPU]):
        step(torch.ones(3, 5))
    assert [event.name for event in trace(step, 1) if event.name in NAMES] == list(NAMES)


def test_a_step_that_was_traced_goes_with_its_last_reference() -> None:
    step = make(blackbox=False)
    trace(step, 1)
    gone = weakref.ref(step)
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        gc.enable()
