"""The device rule computes what each peer computes, step by step, and never looks at the device to do so."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import FP32_MAX, SCALE_RULES, ScaleRule
from halfstep.scale import GradScaler
from halfstep.scale.rule import (
    ScaleState,
    advance,
    advance_,
    initial_host,
    initial_state,
    load_host,
    state_to_host,
)
from tests.policy.test_scale_rule import rules
from tests.scale import peers
from tests.scale.loops import waits
from tests.scale.peers import f32

GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)

# Runs of good and bad steps, rather than coin flips: windows, floors and ceilings are only reached by runs.
sequences = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=14).map(
    lambda runs: [bad for bad, length in runs for _ in range(length)]
)


def assert_same_scales(rule: ScaleRule, peer: Any, steps: Iterable[bool], *, alarms: bool = False) -> None:
    """Run both; scales must be equal at every step, and so must alarms where the peer would have raised."""
    state = initial_state(rule, "cpu")
    for number, bad in enumerate(steps):
        state = advance(rule, state, BAD if bad else GOOD)
        peer.step(bad)
        assert state.scale.item() == peer.scale, (number, bad, rule)
        if alarms:
            assert state.alarm.item() == peer.alarm, (number, bad, rule)
            if peer.alarm:
                return


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=sequences, interval=st.integers(1, 6), power=st.sampled_from([2.0, 4.0]))
def test_rules_kept_in_python_floats(steps: list[bool], interval: int, power: float) -> None:
    """Powers of two: an fp32 scale is exact where the peer has a Python float."""
    same: dict[str, Any] = {"growth": power, "interval": interval}
    both = {**same, "backoff": 1.0 / power}
    named = SCALE_RULES
    assert_same_scales(dataclasses.replace(named["apex"], **same), peers.Apex(**same), steps)
    assert_same_scales(dataclasses.replace(named["apex-fp16-utils"], **both), peers.ApexFp16Utils(**same), steps)
    assert_same_scales(dataclasses.replace(named["megengine"], **both), peers.MegEngine(**both), steps)
    manager = dataclasses.replace(named["mindspore-manager"], **both, patience=5)
    assert_same_scales(manager, peers.MindSporeManager(**same, patience=5), steps, alarms=False)
    low: dict[str, Any] = {"init": 8.0}
    for shift in (1, 2, 3):
        for consecutive in (False, True):
            rule = dataclasses.replace(
                named["deepspeed"], **both, **low, hysteresis=shift, refill="good" if consecutive else "growth"
            )
            peer = peers.DeepSpeed(scale=8.0, **same, shift=shift, consecutive=consecutive)
            assert_same_scales(rule, peer, steps, alarms=True)
    for tolerance in (0.0, 0.2, 0.5, 1.0):
        rule = dataclasses.replace(named["fairseq"], **both, init=2.0**-6, tolerance=tolerance)
        assert_same_scales(rule, peers.Fairseq(scale=2.0**-6, **same, tolerance=tolerance), steps, alarms=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=sequences,
    interval=st.integers(1, 6),
    growth=st.sampled_from([2.0, 3.0, 1.5, 1.1, 10.0]),
    init=st.sampled_from([2.0**16, 1.0, 3.0, 2.0**-120, 2.0**125]),
)
def test_rules_kept_in_fp32(steps: list[bool], interval: int, growth: float, init: float) -> None:
    """Any factor and both ends of fp32: product or quotient, held or lost at inf, to the last bit."""
    same: dict[str, Any] = {"growth": growth, "interval": interval}
    named = SCALE_RULES
    for backoff in (0.5, 1.0 / growth, 0.3):
        both = {**same, "backoff": backoff}
        assert_same_scales(
            dataclasses.replace(named["torch"], **both, init=init), peers.Torch(scale=init, **both), steps
        )
    floored = max(init, 1.0)
    rule = dataclasses.replace(named["mindspore-scaler"], **same, backoff=1.0 / growth, init=floored)
    # A Python float as factor: MindSpore refuses anything but an int, so 1.5 and 1.1 are an extension.
    assert_same_scales(rule, peers.MindSporeScaler(scale=floored, **same), steps)
    if f32(growth) == growth:
        rule = dataclasses.replace(named["mindspore-cell"], **same, backoff=f32(1.0 / growth), init=floored)
        assert_same_scales(rule, peers.MindSporeCell(scale=floored, **same), steps)
    single: dict[str, Any] = {"growth": f32(growth), "backoff": f32(1.0 / growth), "interval": interval}
    for hysteresis in (1, 2, 4):
        rule = dataclasses.replace(named["megatron"], **single, init=floored, hysteresis=hysteresis)
        assert_same_scales(rule, peers.Megatron(scale=floored, **single, hysteresis=hysteresis), steps)


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("torch", peers.Torch()),
        ("apex", peers.Apex()),
        ("apex-fp16-utils", peers.ApexFp16Utils()),
        ("deepspeed", peers.DeepSpeed()),
        ("megatron", peers.Megatron()),
        ("fairseq", peers.Fairseq()),
        ("mindspore-scaler", peers.MindSporeScaler()),
        ("mindspore-cell", peers.MindSporeCell()),
        ("mindspore-manager", peers.MindSporeManager()),
        ("megengine", peers.MegEngine()),
    ],
)
def test_presets_as_they_are(name: str, peer: Any) -> None:
    """The peers' own defaults, over a first descent and two of the longest windows."""
    draw = random.Random(7)
    steps = [True] * 5 + [draw.random() < 0.3 for _ in range(40)] + [False] * 2001 + [True, True] + [False] * 1002
    assert_same_scales(SCALE_RULES[name], peer, steps, alarms=True)


def test_a_fault_in_the_rule_is_seen() -> None:
    """Each law has a twin that it catches: one number off and the comparison fails."""
    steps = [True, True, False, False, False, True] * 6
    fine: dict[str, Any] = {"growth": 2.0, "interval": 3}
    for wrong in ({"interval": 2}, {"hysteresis": 2}, {"delay": 1}, {"backoff": 0.25}, {"growth": 4.0}):
        rule = dataclasses.replace(SCALE_RULES["torch"], **{**fine, **wrong})
        with pytest.raises(AssertionError):
            assert_same_scales(rule, peers.Torch(**fine), steps)


def test_the_manager_loses_patience_at_the_1001st_bad_step() -> None:
    rule = SCALE_RULES["mindspore-manager"]
    state = initial_state(rule, "cpu")
    for _ in range(1000):
        state = advance(rule, state, BAD)
    # It sits at its floor of 1, which is an alarm of the other kind; patience is told by the streak.
    assert state_to_host(state)["streak"] == 1000 and state_to_host(state)["scale"] == 1.0
    state = advance(rule, state, BAD)
    assert state.alarm.item() and state.streak.item() == rule.patience + 1
    assert advance(rule, state, GOOD).streak.item() == 0


def test_halfstep_stays_between_floor_and_ceiling_and_says_so() -> None:
    rule = dataclasses.replace(SCALE_RULES["halfstep"], interval=1)
    state = initial_state(rule, "cpu")
    for number in range(200):
        state = advance(rule, state, BAD)
        assert state.alarm.item() == (number >= 30)  # 30 halvings lead to 2**-14, the 31st finds nothing to halve
    assert state.scale.item() == 2.0**-14
    for _ in range(60):
        state = advance(rule, state, GOOD)
        assert not state.alarm.item()
    assert state.scale.item() == 2.0**24


@pytest.mark.parametrize("own", [True, False])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rule=rules(), steps=sequences)
def test_in_place_is_bit_equal(own: bool, rule: ScaleRule, steps: list[bool]) -> None:
    """`advance_` (one operator, or torch's kernel and a clamp, where they fit) against `advance`, for any rule."""
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setenv("HALFSTEP_NATIVE", "0")
        assert_same_in_place(rule, steps)


def assert_same_in_place(rule: ScaleRule, steps: list[bool]) -> None:
    # Values as scalers produce them: a sum over devices may be 2, and a poisoned flag is still a flag.
    rule = dataclasses.replace(rule, interval=min(rule.interval, 4))
    pure, changed = initial_state(rule, "cpu"), initial_state(rule, "cpu")
    addresses = [field.data_ptr() for field in changed]
    for number, bad in enumerate(steps[:40]):
        found = torch.tensor([1.0, 2.0, float("nan")][number % 3] if bad else 0.0)
        pure = advance(rule, pure, found)
        advance_(rule, changed, found)
        assert state_to_host(pure) == state_to_host(changed)
    assert addresses == [field.data_ptr() for field in changed]


@pytest.mark.parametrize("name", ["torch", "halfstep", "apex", "megengine"])
@pytest.mark.parametrize("init", [2.0**16, 2.0**-125, 2.0**126])
def test_in_place_is_bit_equal_at_both_ends_of_fp32(name: str, init: float) -> None:
    rule = SCALE_RULES[name]
    rule = dataclasses.replace(rule, interval=1, growth=3.0, floor=0.0, ceiling=max(rule.ceiling, init), init=init)
    pure, changed = initial_state(rule, "cpu"), initial_state(rule, "cpu")
    for found in [GOOD] * 5 + [BAD] * 40 + [GOOD] * 5:
        pure = advance(rule, pure, found)
        advance_(rule, changed, found)
        assert state_to_host(pure) == state_to_host(changed)


@pytest.mark.parametrize("name", SCALE_RULES)
def test_nothing_waits_and_nothing_is_changed(name: str) -> None:
    rule = dataclasses.replace(SCALE_RULES[name], tolerance=0.5, patience=3)
    state = initial_state(rule, "cpu")
    before = state_to_host(state)
    with waits(0):
        advance(rule, state, BAD)
        after = advance(rule, state, torch.tensor([True]))
    assert state_to_host(state) == before
    assert [field.dtype for field in after] == [field.dtype for field in state]
    assert [field.shape for field in after] == [torch.Size([])] * len(state)
    scaler = GradScaler(rule=rule)
    scaler.scale_on("cpu")
    with waits(0):
        advance_(rule, state, BAD)
        scaler.update(torch.tensor(64.0))


def test_the_counter_of_reads_can_fail() -> None:
    with pytest.raises(AssertionError), waits(0):
        torch.ones(()).item()


@pytest.mark.parametrize("name", ["halfstep", "deepspeed", "fairseq"])
def test_traces_without_a_graph_break(name: str) -> None:
    rule = dataclasses.replace(SCALE_RULES[name], interval=2, tolerance=0.3 if name == "fairseq" else 0.0)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda state, found: advance(rule, state, found),
        fullgraph=True,
        backend="aot_eager" if name == "deepspeed" else "eager",
    )
    state = other = initial_state(rule, "cpu")
    for found in (GOOD, GOOD, GOOD, BAD, BAD, GOOD):
        state, other = advance(rule, state, found), compiled(other, found)
        assert state_to_host(state) == state_to_host(ScaleState(*other))


def test_a_state_goes_to_the_host_and_back() -> None:
    rule = ScaleRule(hysteresis=3, delay=2, patience=7)
    host = state_to_host(initial_state(rule, "cpu"))
    assert host == initial_host(rule)
    assert [type(value) for value in host.values()] == [float, *[int] * 6, bool]
    host.update(scale=0.1, good=2**31 - 2, slack=1, streak=5, alarm=True)
    assert state_to_host(load_host(host, "cpu")) == {**host, "scale": f32(0.1)}


@pytest.mark.parametrize(
    ("value", "scale"),
    [
        (8.0, 8.0),
        (16, 16.0),
        (torch.tensor(8.0), 8.0),
        (torch.tensor([8], dtype=torch.int64), 8.0),
        (torch.tensor(2.0**30), 2.0**24),
        (torch.tensor(2.0**-30, dtype=torch.float64), 2.0**-14),
        (torch.tensor(float("inf")), 65536.0),
        (torch.tensor(float("nan")), 65536.0),
        (torch.tensor(0.0), 65536.0),
        (torch.tensor(-8.0), 65536.0),
    ],
)
def test_the_scale_is_set_by_hand(value: Any, scale: float) -> None:
    scaler = GradScaler(rule=ScaleRule())
    scaler.scale_on("cpu")
    scaler.update(value)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0**30, "update: new_scale must be a number in [6.103515625e-05, 16777216.0], the scale's bounds"),
        (0.0, "and is 0.0"),
        (float("nan"), "and is nan"),
        ("8", "or a one-element tensor, and is '8'"),
        (True, "and is True"),
        (torch.ones(2), "a tensor of shape (2,)"),
        (torch.ones((), requires_grad=True), "requires_grad=True; expected one real element without grad"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(value: Any, text: str) -> None:
    scaler = GradScaler(rule=ScaleRule())
    scaler.scale_on("cpu")
    with pytest.raises(ScaleError) as caught:
        scaler.update(value)
    assert text in str(caught.value)
    assert scaler.get_scale() == 65536.0


def test_a_tracker_past_the_interval_grows_at_the_next_good_step() -> None:
    rule = ScaleRule(interval=5)
    state = load_host({**initial_host(rule), "good": 9}, "cpu")
    assert state_to_host(advance(rule, state, GOOD)) == {**initial_host(rule), "scale": 2.0**17}


def test_without_a_floor_the_scale_dies() -> None:
    rule = SCALE_RULES["torch"]
    state = initial_state(rule, "cpu")
    for _ in range(165):
        state = advance(rule, state, BAD)
    assert state.scale.item() > 0.0
    state = advance(rule, state, BAD)
    assert state.scale.item() == 0.0
    assert rule.ceiling == FP32_MAX and advance(rule, state, BAD).alarm.item()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=sequences,
    interval=st.integers(1, 6),
    growth=st.floats(1.0, 4.0),
    backoff=st.floats(0.1, 1.0),
    init=st.floats(1e-3, 1e6),
)
def test_a_rule_that_keeps_fp64_is_a_python_float(
    steps: list[bool], interval: int, growth: float, backoff: float, init: float
) -> None:
    numbers: dict[str, Any] = {"growth": growth, "backoff": backoff, "interval": interval}
    rule = dataclasses.replace(SCALE_RULES["megengine"], **numbers, init=init)
    assert_same_scales(rule, peers.MegEngine(scale=init, **numbers), steps)


def test_a_scale_kept_in_fp64_meets_losses_as_fp32_and_survives_saving() -> None:
    rule = dataclasses.replace(SCALE_RULES["megengine"], init=0.1, growth=3.0, backoff=0.3, interval=1)
    scaler, weight = GradScaler(rule=rule), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None and weight.grad.dtype is torch.float32
    assert weight.grad.tolist() == [f32(0.1)] * 3
    scaler.step(optimizer)  # fused: gets the scale as a tensor
    scaler.update()
    assert weight.tolist() == [0.0] * 3
    assert scaler.get_scale() == 0.1 * 3.0 != f32(0.1) * 3.0
    again = GradScaler(rule=rule)
    again.load_state_dict(scaler.state_dict())
    for one in (scaler, again, copy.deepcopy(scaler)):
        one.record(torch.tensor(True))
        one.update()
        assert one.get_scale() == 0.1 * 3.0 * 0.3
        one.update(1.1)
        assert one.get_scale() == 1.1


def test_a_scale_kept_in_fp64_does_not_grow_past_fp32() -> None:
    rule = dataclasses.replace(SCALE_RULES["megengine"], init=2.0**126, growth=3.0, interval=1)
    state = initial_state(rule, "cpu")
    for _ in range(3):
        state = advance(rule, state, GOOD)
    assert state.scale.item() == 3.0 * 2.0**126 < FP32_MAX
