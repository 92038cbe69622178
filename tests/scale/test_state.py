"""Numbers of a scaler: chosen, validated, read, set, saved, loaded and copied."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule
from halfstep.scale import GradScaler
from tests.scale.loops import INF, backward, one_step, parameters


def test_settings_are_read_and_set() -> None:
    scaler = GradScaler("cpu", 8.0, 3.0, 0.25, 5)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 5)
    assert scaler.is_enabled() and scaler.rule.init == scaler.get_scale() == 8.0
    optimizer = torch.optim.SGD(parameters(), lr=0.0)
    for _ in range(4):
        one_step(scaler, optimizer)
    scaler.set_growth_factor(2.0)
    scaler.set_growth_interval(2)  # four good steps are past: the next one grows (torch's tracker would run away)
    one_step(scaler, optimizer)
    assert scaler.get_scale() == 16.0
    scaler.set_backoff_factor(0.125)
    one_step(scaler, optimizer, bad=True)
    assert scaler.get_scale() == 2.0
    divides = GradScaler(rule="deepspeed")
    divides.set_growth_factor(4.0)
    assert divides.get_backoff_factor() == 0.25
    with pytest.raises(ScaleError, match="is not 1/growth"):
        divides.set_backoff_factor(0.5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"device": "gpu"}, "device='gpu' is not a device; expected a type such as 'cuda' or 'cpu'"),
        ({"init_scale": 0.0}, "between floor and ceiling, and is 0.0"),
        ({"init_scale": "high"}, "between floor and ceiling, and is 'high'"),
        (
            {"growth_factor": 1.0},
            "GradScaler: growth_factor must be a number above 1, 2.0 is usual (a scale that stays: rule=",
        ),
        ({"growth_factor": INF}, "growth_factor must be a number above 1, 2.0 is usual"),
        ({"backoff_factor": 1.0}, "backoff_factor must be a number above 0 and below 1, 0.5 is usual"),
        ({"growth_interval": 0}, "interval must be a whole number of steps in [1, 2147483646] and is 0"),
        ({"enabled": "yes"}, "GradScaler: enabled must be True or False or 0 or 1 and is 'yes'"),
        (
            {"floor": 2.0**17},
            "init must be a number in [131072.0, 16777216.0], between floor and ceiling, and is 65536.0",
        ),
        ({"ceiling": 2.0}, "between floor and ceiling, and is 65536.0"),
        ({"hysteresis": 0}, "GradScaler: hysteresis must be a whole number from 1 and is 0"),
        ({"rule": "tourch"}, "GradScaler: rule must be a ScaleRule or one of 'halfstep', 'torch', "),
        ({"rule": "tourch"}, "did you mean 'torch'?"),
        ({"rule": 3}, "rule must be a ScaleRule or one of"),
        ({"rule": "torch", "init_scale": 4.0}, "init_scale given beside rule="),
    ],
)
def test_impossible_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ScaleError) as caught:
        GradScaler(**arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize("method", ["set_growth_factor", "set_backoff_factor", "set_growth_interval"])
@pytest.mark.parametrize("value", [0, -1, "2", None, True, float("nan")])
def test_impossible_settings_change_nothing(method: str, value: Any) -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(ScaleError):
        getattr(scaler, method)(value)
    assert scaler.rule == SCALE_RULES["halfstep"]


def test_bounds_follow_an_unusual_first_scale() -> None:
    assert GradScaler(init_scale=2.0**32).rule.ceiling == 2.0**32
    assert GradScaler(init_scale=2.0**-20).rule.floor == 2.0**-20
    assert GradScaler().rule == SCALE_RULES["halfstep"]
    rule = GradScaler(rule="deepspeed", floor=4.0, hysteresis=3).rule
    assert (rule.floor, rule.hysteresis, rule.divide) == (4.0, 3, True)


def test_without_a_device_it_works_where_the_loss_is() -> None:
    scaler = GradScaler()
    assert scaler.is_enabled() and scaler.scale(torch.ones(())).item() == 2.0**16
    assert "device=None, enabled=True" in repr(scaler)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without CUDA")
@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
def test_a_scaler_for_a_device_that_is_not_there_switches_itself_off(make: Any) -> None:
    with pytest.warns(UserWarning, match="enabled, but CUDA is not available"):
        scaler = make("cuda")
    assert not scaler.is_enabled() and scaler.scale(torch.ones(())).item() == 1.0
    assert not make("cuda", enabled=False).is_enabled()  # nothing to warn of


@pytest.mark.parametrize(
    ("scale", "dtype", "enabled", "rule"),
    [
        ("none", "fp16", False, None),
        ("auto", "fp16", True, SCALE_RULES["halfstep"]),
        ("auto", torch.float16, True, SCALE_RULES["halfstep"]),
        ("auto", "bf16", False, None),
        ("auto", "e4m3", True, SCALE_RULES["halfstep"]),
        ("auto", None, False, None),
        (128.0, "fp16", True, ScaleRule.static(128.0)),
        (1, "bf16", True, ScaleRule.static(1)),
        ("apex", "fp16", True, SCALE_RULES["apex"]),
        (SCALE_RULES["fairseq"], None, True, SCALE_RULES["fairseq"]),
    ],
)
def test_from_policy(scale: Any, dtype: Any, enabled: bool, rule: ScaleRule | None) -> None:
    scaler = GradScaler.from_policy(scale, dtype)
    assert scaler.is_enabled() is enabled
    if rule is not None:
        assert scaler.rule == rule


@pytest.mark.parametrize("scale", ["dynamic", -1.0, True, None])
def test_from_policy_refuses(scale: Any) -> None:
    with pytest.raises(ScaleError):
        GradScaler.from_policy(scale, "fp16")


NUMBERS: dict[str, Callable[[float], Any]] = {
    "numpy": lambda value: np.float64(value) if value % 1 else np.int64(value),
    "numpy fp32": np.float32,
    "array": lambda value: np.array(value),
    "tensor": torch.tensor,
    "float": float,
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
def test_numbers_of_other_libraries_are_numbers(make: Any, kind: str) -> None:
    """With torch's results; what torch refuses it refuses for its own reasons."""
    number = NUMBERS[kind]
    if make is GradScaler or kind not in ("array", "numpy fp32"):  # torch.full takes no arrays
        assert make("cpu", init_scale=number(4.0)).get_scale() == 4.0
    assert make("cpu", growth_interval=number(2000.0)).get_growth_interval() == 2000
    assert make("cpu", growth_factor=number(4.0)).get_growth_factor() == 4.0
    assert make("cpu", backoff_factor=number(0.25)).get_backoff_factor() == 0.25
    scaler = make("cpu")
    scaler.set_growth_factor(number(4.0))
    scaler.set_backoff_factor(number(0.25))
    scaler.set_growth_interval(number(3.0))
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 3)


@pytest.mark.parametrize("kind", NUMBERS)
def test_they_become_plain_ones(kind: str) -> None:
    number = NUMBERS[kind]
    scaler = GradScaler("cpu", number(8.0), number(4.0), number(0.25), number(3.0), floor=number(1.0))
    assert scaler.rule == ScaleRule(init=8.0, growth=4.0, backoff=0.25, interval=3, floor=1.0)
    assert all(type(value) in (int, float) for value in dataclasses.astuple(scaler.rule)[:6])
    assert ScaleRule.static(number(8.0)) == ScaleRule.static(8.0)
    state = {
        key: number(value) if isinstance(value, (int, float)) else value for key, value in scaler.state_dict().items()
    }
    scaler.load_state_dict(state)
    scaler.scale(torch.ones(()))
    scaler.load_state_dict(state)
    assert scaler.state_dict() == GradScaler("cpu", rule=scaler.rule).state_dict()
    scaler.update(number(16.0))
    assert scaler.get_scale() == 16.0
    assert type(scaler.state_dict()["growth_interval"]) is int


@pytest.mark.parametrize("enabled", [np.bool_(False), torch.tensor(False), 0, False])
def test_bools_of_other_libraries_are_bools(enabled: Any) -> None:
    assert (
        not GradScaler(enabled=enabled).is_enabled() and not torch.amp.GradScaler("cpu", enabled=enabled).is_enabled()
    )
    assert GradScaler(enabled=not enabled).is_enabled()


@pytest.mark.parametrize(
    "numbers",
    [
        {"init_scale": np.bool_(True)},
        {"init_scale": torch.tensor(True)},
        {"init_scale": torch.ones(2)},
        {"init_scale": np.float32("nan")},
        {"growth_interval": np.float32(2.5)},
        {"growth_interval": "3"},
        {"growth_factor": torch.tensor(1.0)},
        {"enabled": None},
        {"enabled": "yes"},
        {"enabled": 2},
    ],
)
def test_nonsense_is_still_named(numbers: dict[str, Any]) -> None:
    with pytest.raises(ScaleError, match=next(iter(numbers)).removeprefix("init_").removeprefix("growth_")):
        GradScaler("cpu", **numbers)


@pytest.mark.parametrize(
    "loss", [torch.tensor(3), torch.tensor([1, 2]), torch.tensor(True), [torch.tensor(2), 1.5 * torch.ones(2)]]
)
def test_losses_of_whole_numbers_are_scaled_as_by_torch(loss: Any) -> None:
    mine, torchs = GradScaler("cpu").scale(loss), torch.amp.GradScaler("cpu").scale(loss)
    torch.testing.assert_close(mine, torchs, rtol=0.0, atol=0.0)


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
        ({**GOOD_STATE, "scale": "8"}, "load_state_dict: scale must be a finite number from 0 and is '8'"),
        ({**GOOD_STATE, "scale": -1.0}, "scale must be a finite number from 0 and is -1.0"),
        ({**GOOD_STATE, "scale": float("nan")}, "scale must be a finite number from 0 and is nan"),
        ({**GOOD_STATE, "scale": INF}, "scale must be a finite number from 0 and is inf"),
        ({**GOOD_STATE, "growth_factor": 0.5}, "load_state_dict: scale rule: growth must be a number in [1.0, "),
        ({**GOOD_STATE, "backoff_factor": None}, "0.5 halves the scale, and is None"),
        (
            {**GOOD_STATE, "growth_interval": 2.5},
            "interval must be a whole number of steps in [1, 2147483646] and is 2.5",
        ),
        (
            {**GOOD_STATE, "_growth_tracker": -1},
            "load_state_dict: _growth_tracker must be a whole number of steps in [0, 2147483646] and is -1",
        ),
        ({**GOOD_STATE, "_growth_tracker": 2.5}, "and is 2.5"),
        ({**GOOD_STATE, "halfstep": 3}, "'halfstep' is 3; expected a dict of counters"),
        (
            {**GOOD_STATE, "halfstep": {"slack": "x"}},
            "load_state_dict: slack must be a whole number of steps in [0, 2147483646] and is 'x'",
        ),
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
