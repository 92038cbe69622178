"""ScaleRule is plain validated numbers; the presets are the peers' published defaults."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import ScaleError
from halfstep.policy.scale_rule import FP32_MAX, SCALE_RULES, ScaleRule


@st.composite
def rules(draw: st.DrawFn) -> ScaleRule:
    """Draw any valid rule."""
    floor = draw(st.sampled_from([0.0, 2.0**-14, 1e-4, 1.0]))
    ceiling = draw(st.sampled_from([2.0**16, 2.0**24, FP32_MAX]))
    growth = draw(st.floats(1.0, 16.0))
    divide = draw(st.booleans())
    return ScaleRule(
        init=draw(st.floats(2.0, 2.0**16)),
        growth=growth,
        backoff=1.0 / growth if divide else draw(st.floats(0.01, 1.0)),
        interval=draw(st.integers(1, 4000)),
        floor=floor,
        ceiling=ceiling,
        hysteresis=draw(st.integers(1, 5)),
        refill=draw(st.sampled_from(["growth", "good"])),
        divide=divide,
        delay=draw(st.integers(0, 3)),
        tolerance=draw(st.floats(0.0, 1.0)),
        at_floor=draw(st.sampled_from(["warn", "raise", "refuse"])),
        patience=draw(st.integers(0, 1000)),
        guard=draw(st.booleans()),
        kept=draw(st.sampled_from(["fp32", "fp64"])),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(rules())
def test_a_rule_survives_repr_pickle_and_replace(rule: ScaleRule) -> None:
    assert eval(repr(rule)) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert hash(dataclasses.replace(rule)) == hash(rule)


@pytest.mark.parametrize("name", SCALE_RULES)
def test_presets_are_valid_and_printable(name: str) -> None:
    rule = SCALE_RULES[name]
    assert eval(repr(rule)) == rule
    assert not rule.is_static


# (init, growth, backoff, interval, floor, ceiling, hysteresis): the golden numbers, changed only on purpose.
GOLDEN = {
    "halfstep": (65536.0, 2.0, 0.5, 2000, 2.0**-14, 2.0**24, 1),
    "torch": (65536.0, 2.0, 0.5, 2000, 0.0, FP32_MAX, 1),
    "apex": (65536.0, 2.0, 0.5, 2000, 0.0, 2.0**24, 1),
    "apex-fp16-utils": (2.0**32, 2.0, 0.5, 1000, 1.0, FP32_MAX, 1),
    "deepspeed": (65536.0, 2.0, 0.5, 1000, 1.0, FP32_MAX, 2),
    "megatron": (2.0**32, 2.0, 0.5, 1000, 1.0, FP32_MAX, 2),
    "fairseq": (2.0**15, 2.0, 0.5, 2000, 1e-4, FP32_MAX, 1),
    "mindspore-scaler": (2.0**24, 2.0, 0.5, 2000, 1.0, FP32_MAX, 1),
    "mindspore-cell": (2.0**24, 2.0, 0.5, 2000, 1.0, FP32_MAX, 1),
    "mindspore-manager": (2.0**24, 2.0, 0.5, 2000, 1.0, FP32_MAX, 1),
    "megengine": (16.0, 2.0, 0.5, 2000, 0.0, FP32_MAX, 1),
}


def test_presets_are_the_golden_numbers() -> None:
    fields = ("init", "growth", "backoff", "interval", "floor", "ceiling", "hysteresis")
    assert {name: tuple(getattr(rule, field) for field in fields) for name, rule in SCALE_RULES.items()} == GOLDEN


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        SCALE_RULES["torch"] = ScaleRule()  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SCALE_RULES["torch"].init = 1.0  # type: ignore[misc]


def test_static_is_one_scale() -> None:
    rule = ScaleRule.static(128)
    assert rule.is_static
    assert (rule.init, rule.floor, rule.ceiling, rule.growth, rule.backoff) == (128, 128, 128, 1.0, 1.0)
    assert ScaleRule(growth=1.0, backoff=1.0).is_static
    assert not ScaleRule(growth=1.0).is_static


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            {"init": "65536"},
            "init must be a number in [6.103515625e-05, 16777216.0], between floor and ceiling, and is '65536'",
        ),
        ({"init": True}, "and is True"),
        (
            {"init": math.nan},
            "init must be a number in [6.103515625e-05, 16777216.0], between floor and ceiling, and is nan",
        ),
        ({"init": 2.0**30}, "between floor and ceiling, and is "),
        ({"init": 2.0**-20}, "between floor and ceiling, and is "),
        ({"init": 0.0, "floor": 0.0}, "init=0.0 is 0 in fp32; give a positive scale"),
        ({"init": 1e-60, "floor": 0.0}, "init=1e-60 is 0 in fp32"),
        (
            {"growth": 0.5},
            "growth must be a number in [1.0, 3.4028234663852886e+38], at least 1; 2 doubles the scale, and is 0.5",
        ),
        (
            {"growth": math.inf},
            "growth must be a number in [1.0, 3.4028234663852886e+38], at least 1; 2 doubles the scale, and is inf",
        ),
        ({"backoff": 0.0}, "at most 1; 0.5 halves the scale, and is 0.0"),
        (
            {"backoff": 1.5},
            "backoff must be a number in [1.1754943508222875e-38, 1.0], above 0 and at most 1; 0.5 halves",
        ),
        ({"interval": 0}, "interval must be a whole number of steps in [1, 2147483646] and is 0"),
        ({"interval": 2000.5}, "interval must be a whole number of steps in [1, 2147483646] and is 2000.5"),
        ({"interval": True}, "and is True"),
        ({"interval": 2**31}, "and is 2147483648"),
        (
            {"floor": -1.0},
            "floor must be a number in [0.0, 3.4028234663852886e+38], 0 (no floor) or a positive scale, and is -1.0",
        ),
        (
            {"floor": 2.0, "ceiling": 1.0},
            "ceiling must be a number in [2.0, 3.4028234663852886e+38], at least floor; FP32_MAX for none, and is 1.0",
        ),
        ({"ceiling": math.inf}, "FP32_MAX for none"),
        ({"hysteresis": 0}, "hysteresis must be a whole number of steps in [1, 2147483646] and is 0"),
        ({"delay": -1}, "delay must be a whole number of steps in [0, 2147483646] and is -1"),
        ({"patience": 1.5}, "patience must be a whole number of steps in [0, 2147483646] and is 1.5"),
        ({"tolerance": 2.0}, "tolerance must be a number in [0.0, 1.0], a share of steps, and is 2.0"),
        ({"refill": "never"}, "refill must be one of 'growth', 'good' and is 'never'"),
        ({"at_floor": "stop"}, "at_floor must be one of 'warn', 'raise', 'refuse' and is 'stop'"),
        ({"divide": 1}, "divide must be True or False and is 1"),
        ({"guard": None}, "guard must be True or False and is None"),
        ({"divide": True, "growth": 3.0}, "is not 1/growth; set backoff=0.3333333333333333 or divide=False"),
        ({"at_floor": "refuse", "init": 1.0, "floor": 1.0}, "raise init or lower floor"),
    ],
)
def test_each_impossible_value_is_named(numbers: dict[str, object], text: str) -> None:
    with pytest.raises(ScaleError) as caught:
        ScaleRule(**numbers)  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert "scale rule" in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -8.0, math.inf, True, None, "128"])
def test_a_static_scale_that_cannot_be_is_named(value: object) -> None:
    with pytest.raises(
        ScaleError,
        match=f"scale rule: a static value must be a number in .*a positive scale that fp32 can hold, and is {value!r}",
    ):
        ScaleRule.static(value)  # type: ignore[arg-type]


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        ScaleRule(65536.0)  # type: ignore[call-arg]
