"""Numbers of a scaler: chosen, validated, read and set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import SCALE_RULES, ScaleRule
from halfstep.scale import GradScaler
from tests.scale.loops import INF, one_step, parameters


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
        ({"init_scale": 0.0}, "init=0.0"),
        ({"init_scale": "high"}, "init='high' is a str"),
        ({"growth_factor": 1.0}, "growth_factor=1.0; expected a number above 1.0"),
        ({"growth_factor": INF}, "growth_factor=inf"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0; expected a number above 0.0 and below 1.0, 0.5 is usual"),
        ({"growth_interval": 0}, "interval=0"),
        ({"enabled": "yes"}, "enabled='yes' is a str; expected True or False"),
        ({"floor": 2.0**17}, "init=65536.0 is outside [131072.0"),
        ({"ceiling": 2.0}, "init=65536.0 is outside"),
        ({"hysteresis": 0}, "hysteresis=0"),
        ({"rule": "tourch"}, "rule='tourch'; expected a ScaleRule or one of halfstep, torch"),
        ({"rule": "tourch"}, "did you mean 'torch'?"),
        ({"rule": 3}, "rule=3; expected a ScaleRule"),
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
