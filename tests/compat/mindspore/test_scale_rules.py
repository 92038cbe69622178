"""The three loss-scale rules against models written from MindSpore's formulas, step by step and exactly.

The models know nothing of halfstep: float32 arithmetic is done through `struct`.
"""

from __future__ import annotations

import math
import random
import struct
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import halfstep.compat.mindspore as ms
from halfstep.errors import HalfstepError
from tests.compat.mindspore.nets import untyped

Model = Callable[[bool], float]
SEQUENCES = {"scaler": 3000, "cell": 3000, "manager": 5000}  # 11,000 in all
INITS = (1.0, 3.0, 1000.0, 12345.678, 2.0**10, 2.0**16, 2.0**24, 2.0**31)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A scale that cannot fall warns, as it should; not the subject here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss scale is at its floor|gradients are not finite under the static")
        yield


def f32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def scaler_model(scale: float, factor: int, window: int) -> Model:
    """DynamicLossScaler.adjust."""
    state = [f32(scale), 0.0]

    def step(bad: bool) -> float:
        s, counter = state
        if bad:
            state[:] = [max(1.0, f32(s / factor)), 0]
        else:
            grown = f32(s * factor)
            new = grown if counter == window - 1 and math.isfinite(grown) else s
            state[:] = [new, (counter + 1) % window]
        return state[0]

    return step


def cell_model(scale: float, factor: float, window: int) -> Model:
    """DynamicLossScaleUpdateCell."""
    state = {"s": f32(scale), "cur": 1, "last": 0}
    wide = f32(factor)
    reciprocal = f32(1.0 / wide)

    def step(bad: bool) -> float:
        due = window <= state["cur"] - state["last"]
        if bad:
            state["s"] = max(f32(state["s"] * reciprocal), 1.0)
        elif due:
            state["s"] = f32(state["s"] * wide)
        if bad or due:
            state["last"] = state["cur"]
        state["cur"] += 1
        return state["s"]

    return step


def manager_model(scale: float, factor: float, window: int) -> Model:
    """DynamicLossScaleManager.update_loss_scale, in Python floats."""
    state = {"s": float(scale), "cur": 1, "last": 0}

    def step(bad: bool) -> float:
        if bad:
            state["s"] = max(state["s"] / factor, 1.0)
            state["last"] = state["cur"]
        elif (state["cur"] - state["last"]) % window == 0:
            state["s"] *= factor
        state["cur"] += 1
        return state["s"]

    return step


def scaler_real(scale: float, factor: int, window: int) -> Model:
    scaler = ms.amp.DynamicLossScaler(scale, factor, window)

    def step(bad: bool) -> float:
        assert scaler.adjust(torch.tensor(not bad)) is True
        return float(scaler.scale_value)

    return step


def cell_real(scale: float, factor: float, window: int) -> Model:
    cell, live = ms.nn.DynamicLossScaleUpdateCell(scale, factor, window), torch.tensor(scale)

    def step(bad: bool) -> float:
        assert bool(cell(live, torch.tensor(bad))) is bad
        return float(live)

    return step


def manager_real(scale: float, factor: float, window: int) -> Model:
    manager = ms.amp.DynamicLossScaleManager(scale, factor, window)

    def step(bad: bool) -> float:
        manager.update_loss_scale(bad)
        return manager.get_loss_scale()

    return step


PAIRS = {
    "scaler": (scaler_real, scaler_model),
    "cell": (cell_real, cell_model),
    "manager": (manager_real, manager_model),
}


def draw(rng: random.Random, name: str) -> tuple[float, float, int]:
    """Draw parameters: whole factors for all, fractional ones where MindSpore takes them."""
    factor: float = rng.choice([1, 2, 2, 3, 4, 5, 7, 10])
    if name != "scaler" and rng.random() < 0.3:
        factor = round(rng.uniform(1.0, 4.0), 3)
    init = rng.choice(INITS) if rng.random() < 0.8 else rng.uniform(1.0, 2.0**20)
    return init, factor, rng.choice([1, 1, 2, 3, 5])


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.hours)], ids=["a quarter", "all"])
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_rule_agrees_with_mindspore_exactly_over_random_sequences(name: str, share: int) -> None:
    rng = random.Random(name)
    real, model = PAIRS[name]
    steps = 40 if name == "manager" else 9
    for number in range(SEQUENCES[name] // share):
        init, factor, window = draw(rng, name)
        often = rng.choice([0.05, 0.3, 0.5, 0.9])
        ours, theirs = real(init, factor, window), model(init, factor, window)  # type: ignore[arg-type]
        history = []
        for _ in range(steps):
            bad = rng.random() < often
            history.append(bad)
            assert ours(bad) == theirs(bad), f"sequence {number}: {(init, factor, window)} {history}"


@pytest.mark.parametrize("name", ["scaler", "cell"])
def test_a_rule_agrees_over_a_long_run_of_thousands_of_steps(name: str) -> None:
    rng = random.Random(1)
    real, model = PAIRS[name]
    for factor, window in ((2, 20), (3, 7)):
        ours, theirs = real(2.0**24, factor, window), model(2.0**24, factor, window)
        for _ in range(2000):
            bad = rng.random() < 1.2 / window
            assert ours(bad) == theirs(bad)


def test_a_model_with_another_formula_is_told_apart() -> None:
    cell, scaler = cell_real(1000.0, 3.0, 5), scaler_model(1000.0, 3, 5)
    assert [cell(True) for _ in range(4)] != [scaler(True) for _ in range(4)]  # reciprocal against division


def test_scales_measured_with_mindspore_come_out() -> None:
    # MindSpore 2.10, LeNet-5 at O2, DynamicLossScaleManager(2**16, 2, 3), bad inputs at steps 3, 4 and 9
    bad = [True] * 5 + [False] * 4 + [True] + [False] * 6
    measured = [32768, 16384, 8192, 4096, 2048, 2048, 2048, 4096, 4096, 2048, 2048, 2048, 4096, 4096, 4096, 8192]
    for real in (scaler_real, cell_real, manager_real):
        step = real(2.0**16, 2, 3)
        assert [step(b) for b in bad] == measured


def test_a_growth_past_float32_is_not_carried_out_and_the_scale_lives_on() -> None:
    cell = cell_real(2.0**127, 2, 1)
    assert [cell(False), cell(False), cell(True)] == [2.0**127, 2.0**127, 2.0**126]  # MindSpore: inf, inf, inf
    scaler = scaler_real(2.0**127, 2, 1)
    assert [scaler(False), scaler(True)] == [2.0**127, 2.0**126]


def test_the_manager_takes_a_thousand_bad_steps_in_a_row_and_no_more() -> None:
    manager = ms.amp.DynamicLossScaleManager(2**24, 2, 2000)
    for _ in range(1000):
        manager.update_loss_scale(True)
    with pytest.raises(RuntimeError, match="1001 steps in a row"):
        manager.update_loss_scale(True)


def test_the_manager_starts_counting_bad_steps_anew_after_a_good_one() -> None:
    manager = ms.amp.DynamicLossScaleManager()
    for _ in range(3):
        for _ in range(1000):
            manager.update_loss_scale(torch.tensor(True))
        manager.update_loss_scale(False)
    assert manager.get_loss_scale() == 1.0


def test_defaults_are_mindspores() -> None:
    manager = ms.amp.DynamicLossScaleManager()
    assert (manager.get_loss_scale(), manager.scale_factor, manager.scale_window) == (2.0**24, 2, 2000)
    fixed = ms.amp.FixedLossScaleManager()
    assert (fixed.get_loss_scale(), fixed.get_drop_overflow_update()) == (128.0, True)
    assert isinstance(fixed.get_update_cell(), ms.nn.FixedLossScaleUpdateCell)
    assert ms.amp.FixedLossScaleManager(8.0, False).get_update_cell() is None
    assert isinstance(manager.get_update_cell(), ms.nn.DynamicLossScaleUpdateCell)
    assert manager.get_update_cell() is not manager.get_update_cell()


def test_a_fixed_scale_stays() -> None:
    cell, live = ms.nn.FixedLossScaleUpdateCell(64.0), torch.tensor(64.0)
    assert bool(cell(live, torch.tensor(True))) and float(live) == cell.get_loss_scale() == 64.0
    scaler = ms.amp.StaticLossScaler(64)
    assert scaler.adjust(False) is False and float(scaler.scale_value) == 64.0
    manager = ms.amp.FixedLossScaleManager(64.0)
    manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 64.0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: untyped.amp.StaticLossScaler(0.5),
            ValueError,
            "scale_value=0.5; expected a finite number of at least 1",
        ),
        (lambda: untyped.amp.StaticLossScaler("8"), TypeError, "scale_value='8' is a str"),
        (lambda: untyped.amp.StaticLossScaler(float("nan")), ValueError, "finite"),
        (
            lambda: untyped.amp.DynamicLossScaler(8.0, 2.0, 10),
            TypeError,
            "scale_factor=2.0 is a float; expected an int",
        ),
        (lambda: untyped.amp.DynamicLossScaler(8.0, 0, 10), ValueError, "scale_factor=0; expected an int from 1"),
        (lambda: untyped.amp.DynamicLossScaler(8.0, 2, 0), ValueError, "scale_window=0"),
        (lambda: untyped.amp.DynamicLossScaler(8.0, 2, 2.5), TypeError, "scale_window=2.5"),
        (lambda: untyped.amp.DynamicLossScaler(8.0), TypeError, "scale_factor"),
        (lambda: untyped.amp.LossScaler(), TypeError, "abstract"),
        (lambda: untyped.amp.DynamicLossScaleManager(0.5), ValueError, "init_loss_scale=0.5"),
        (lambda: untyped.amp.DynamicLossScaleManager(8.0, -2), ValueError, "scale_factor=-2"),
        (lambda: untyped.amp.DynamicLossScaleManager(8.0, 2, True), TypeError, "scale_window=True is a bool"),
        (lambda: untyped.amp.FixedLossScaleManager(0.0), ValueError, "loss_scale=0.0"),
        (lambda: untyped.amp.FixedLossScaleManager(8.0, 1), TypeError, "drop_overflow_update=1"),
        (lambda: untyped.nn.DynamicLossScaleUpdateCell("8", 2, 3), TypeError, "loss_scale_value='8'"),
        (lambda: untyped.nn.FixedLossScaleUpdateCell(0.0), ValueError, "loss_scale_value=0.0"),
    ],
)
def test_an_impossible_scale_is_refused_with_its_name_and_value(
    make: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        make()
    assert isinstance(caught.value, HalfstepError) or "abstract" in text or text == "scale_factor"


def test_counters_of_a_scale_survive_saving_and_loading() -> None:
    first, second = (ms.amp.DynamicLossScaler(2.0**10, 2, 3) for _ in range(2))
    for bad in (False, True, False, False):
        first.adjust(not bad)
    second.load_state_dict(first.state_dict())
    assert second.counter == first.counter == 2
    for scaler in (first, second):
        scaler.adjust(torch.tensor(True))
    assert float(first.scale_value) == float(second.scale_value) == 2.0**10

    cells = [ms.nn.DynamicLossScaleUpdateCell(2.0**10, 2, 3) for _ in range(2)]
    scales = [torch.tensor(2.0**10) for _ in cells]
    for _ in range(2):
        cells[0](scales[0], torch.tensor(False))
    cells[1].load_state_dict(cells[0].state_dict())
    for cell, scale in zip(cells, scales, strict=True):
        cell(scale, torch.tensor(False))
    assert [float(s) for s in scales] == [2.0**11, 2.0**11]
