"""Checkpoints, pickles and copies."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule
from halfstep.scale import GradScaler
from tests.scale.loops import INF, backward, one_step, parameters


@pytest.mark.parametrize("rule", ["torch", "deepspeed", "fairseq", "mindspore-manager"])
def test_resuming_goes_on_exactly(rule: str) -> None:
    chosen = dataclasses.replace(SCALE_RULES[rule], interval=3, tolerance=0.4 if rule == "fairseq" else 0.0)
    pattern = [True, False, False, True, True, False, False, False, False, True, False, True]

    def run(scaler: GradScaler, bad: list[bool]) -> list[float]:
        optimizer = torch.optim.SGD(parameters(1), lr=0.0)
        scales = []
        for each in bad:
            one_step(scaler, optimizer, bad=each)
            scales.append(scaler.get_scale())
        return scales

    whole = run(GradScaler(rule=chosen), pattern)
    for cut in range(len(pattern)):
        first = GradScaler(rule=chosen)
        run(first, pattern[:cut])
        loaded, used = GradScaler(rule=chosen), GradScaler(rule=chosen)
        loaded.load_state_dict(first.state_dict())
        run(used, [True] * 3)
        used.load_state_dict(first.state_dict())
        for second in (loaded, used, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
            assert run(second, pattern[cut:]) == whole[cut:]


def test_checkpoints_travel_to_torch_and_back() -> None:
    ours = GradScaler("cpu", growth_interval=3)
    optimizer = torch.optim.SGD(parameters(), lr=0.0)
    one_step(ours, optimizer, bad=True)
    one_step(ours, optimizer)
    state = ours.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    torchs = theirs.state_dict()
    assert {key: state[key] for key in torchs} == torchs
    back = GradScaler("cpu")
    back.load_state_dict(torchs)
    assert back.state_dict() == {**state, "halfstep": {**state["halfstep"], "bad": 0}}  # torch does not keep that count
    assert state["halfstep"]["bad"] == 1
    for scaler in (theirs, back):
        one_step(scaler, optimizer)
        one_step(scaler, optimizer)
    assert theirs.get_scale() == back.get_scale() == 2.0**16


def test_a_scale_out_of_bounds_is_brought_inside_with_a_warning() -> None:
    state = GradScaler("cpu").state_dict()
    for saved, kept in ((0.0, 2.0**-14), (2.0**40, 2.0**24)):
        scaler = GradScaler("cpu")
        with pytest.warns(UserWarning, match="is outside .* Pass floor= and ceiling= to GradScaler to") as caught:
            scaler.load_state_dict({**state, "scale": saved})
        assert scaler.get_scale() == kept and caught[0].filename == __file__


GOOD_STATE = {"scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 2}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "the state is empty, as a disabled scaler saves it"),
        ([], "got a list; expected what state_dict() returned"),
        ({"scale": 8.0}, "'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker' missing"),
        ({**GOOD_STATE, "scale": "8"}, "scale='8'; expected a finite number"),
        ({**GOOD_STATE, "scale": -1.0}, "scale=-1.0"),
        ({**GOOD_STATE, "scale": float("nan")}, "scale=nan"),
        ({**GOOD_STATE, "scale": INF}, "scale=inf"),
        ({**GOOD_STATE, "growth_factor": 0.5}, "load_state_dict: scale rule: growth=0.5 is outside"),
        ({**GOOD_STATE, "backoff_factor": None}, "backoff=None is a NoneType"),
        ({**GOOD_STATE, "growth_interval": 2.5}, "interval=2.5 is a float"),
        ({**GOOD_STATE, "_growth_tracker": -1}, "_growth_tracker=-1; expected a whole number in [0, 2147483646]"),
        ({**GOOD_STATE, "_growth_tracker": 2.5}, "_growth_tracker=2.5"),
        ({**GOOD_STATE, "halfstep": 3}, "'halfstep' is 3; expected a dict of counters"),
        ({**GOOD_STATE, "halfstep": {"slack": "x"}}, "slack='x'; expected a whole number"),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_a_bad_state_changes_nothing(state: Any, text: str, used: bool) -> None:
    scaler = GradScaler("cpu")
    if used:
        scaler.scale(torch.ones(()))
    before, rule = scaler.state_dict(), scaler.rule
    with pytest.raises(ScaleError) as caught:
        scaler.load_state_dict(state)
    assert text in str(caught.value)
    assert scaler.state_dict() == before and scaler.rule == rule
    scaler.load_state_dict(GOOD_STATE)
    assert {key: scaler.state_dict()[key] for key in GOOD_STATE} == GOOD_STATE


def test_a_tracker_past_the_interval_grows_at_the_next_good_step() -> None:
    """As a torch run with a lowered interval saves it; torch itself never grows again from there."""
    for make, scale in ((torch.amp.GradScaler, 8.0), (GradScaler, 24.0)):
        scaler = make("cpu")
        scaler.load_state_dict({**GOOD_STATE, "_growth_tracker": 20})
        one_step(scaler, torch.optim.SGD(parameters(), lr=0.0))
        assert scaler.get_scale() == scale


def test_a_dead_scale_without_a_floor_is_refused() -> None:
    scaler = GradScaler(rule="torch")
    with pytest.raises(ScaleError, match="is 0 in fp32.*load it into a scaler with a floor"):
        scaler.load_state_dict({**GOOD_STATE, "scale": 0.0})


def test_copies_are_made_between_iterations_only() -> None:
    scaler, params = GradScaler("cpu"), parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    one_step(scaler, optimizer)
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
    backward(scaler, params)
    scaler.unscale_(optimizer)
    for make_copy in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ScaleError, match="only between iterations; call update\\(\\) first"):
            make_copy(scaler)


def test_a_static_scale_that_fp32_rounds_is_loaded_again_without_a_warning() -> None:
    scaler = GradScaler(rule=ScaleRule.static(30759.275186223487))
    scaler.scale(torch.ones(1))
    saved = scaler.state_dict()
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
