"""LossScaler and its older cousins against a model in plain Python of the rules Apex documents."""

from __future__ import annotations

import pickle
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import halfstep as hs
from halfstep.compat.apex import amp, fp16_utils
from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.errors import ScaleError


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad  # behind a call mypy does not remember the last look


@dataclass
class AmpModel:
    """amp.scaler.LossScaler: halve, or double after 2000 good passes in a row, between floor and ceiling."""

    scale: float
    factor: float
    window: int
    floor: float
    ceiling: float
    unskipped: int = 0

    def update(self, overflow: bool) -> bool:
        if overflow:
            self.scale = max(self.floor, self.scale / self.factor)
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(self.ceiling, self.scale * self.factor)
            self.unskipped = 0
        return overflow


@dataclass
class OldModel:
    """fp16_utils.DynamicLossScaler: divide, never below 1, or multiply after each window without an overflow."""

    scale: float
    factor: float
    window: int
    iteration: int = 0
    last: int = -1

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / self.factor, 1)
            self.last = self.iteration
        elif (self.iteration - self.last) % self.window == 0 and self.scale * self.factor < 2.0**128:
            self.scale *= self.factor  # a scale is an fp32 number: where Apex's reaches inf, it stays
        self.iteration += 1


def passes(seed: int, count: int, share: float) -> list[bool]:
    """Return overflows in runs, as training has them."""
    chance = random.Random(seed)
    return [chance.random() < share for _ in range(count)]


def drive(scaler: LossScaler, overflow: bool) -> bool:
    scaler.clear_overflow_state()
    scaler._has_overflow = overflow
    return scaler.update_scale()


@pytest.mark.filterwarnings("ignore:the loss scale is at its floor")
@pytest.mark.parametrize("seed", range(12))
def test_the_scale_is_the_models_at_every_one_of_thousands_of_passes(seed: int) -> None:
    chance = random.Random(seed)
    window, share = chance.choice([1, 3, 20, 200]), chance.choice([0.001, 0.05, 0.3, 0.9])
    floor, ceiling = chance.choice([None, 1.0, 128.0]), chance.choice([2.0**24, 2.0**17, 1000.0])
    factor = chance.choice([2.0, 2.0, 4.0])
    scaler = LossScaler(
        "dynamic", scale_factor=factor, scale_window=window, min_loss_scale=floor, max_loss_scale=ceiling
    )
    model = AmpModel(min(ceiling, 2.0**16), factor, window, floor or 2.0**-14, ceiling)
    for number, overflow in enumerate(passes(seed, 600, share)):
        assert drive(scaler, overflow) == model.update(overflow)
        assert (scaler.loss_scale(), scaler._unskipped) == (model.scale, model.unskipped), number


@pytest.mark.parametrize("seed", range(6))
def test_the_old_dynamic_scaler_is_its_model_at_every_pass(seed: int) -> None:
    chance = random.Random(seed)
    window, factor = chance.choice([1, 3, 20, 100]), chance.choice([2.0, 2.0, 4.0])
    start = chance.choice([2.0**32, 2.0**10, 1.0])
    scaler = fp16_utils.DynamicLossScaler(start, factor, window)
    model = OldModel(start, factor, window)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at its floor
        for overflow in passes(seed, 600, chance.choice([0.05, 0.3, 0.6])):
            scaler.update_scale(overflow)
            model.update(overflow)
            assert (scaler.loss_scale, scaler.cur_scale) == (model.scale, model.scale)
            assert (scaler.cur_iter, scaler.last_overflow_iter) == (model.iteration, model.last)


@given(st.floats(2.0**-10, 2.0**20), st.lists(st.booleans(), max_size=30))
def test_a_static_scale_stays_and_still_says_when_to_skip(value: float, overflows: list[bool]) -> None:
    value = float(torch.tensor(value))
    scaler = LossScaler(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for overflow in overflows:
            assert drive(scaler, overflow) is overflow
            assert scaler.loss_scale() == value and not scaler.dynamic


def test_numbers_come_as_text_too() -> None:
    assert LossScaler("128.0").loss_scale() == 128.0
    with pytest.raises(ValueError, match="could not convert"):
        LossScaler("dynamically")
    with pytest.raises(ScaleError, match="static"):
        LossScaler(0.0)


def test_the_first_scale_is_at_most_the_ceiling_and_at_least_the_floor() -> None:
    assert LossScaler("dynamic").loss_scale() == 2.0**16
    assert LossScaler("dynamic", max_loss_scale=512.0).loss_scale() == 512.0
    assert LossScaler("dynamic", min_loss_scale=2.0**20).loss_scale() == 2.0**20


def test_the_scale_may_be_set_by_hand_as_tests_of_old_do() -> None:
    scaler = LossScaler("dynamic")
    for value in (4.0, 2.0**31, 2.0**-30):
        scaler._loss_scale = value
        assert scaler.loss_scale() == scaler._loss_scale == value
    scaler._unskipped = 1999
    drive(scaler, overflow=False)
    assert scaler._unskipped == 0
    fixed = LossScaler(128.0)
    fixed._loss_scale = 64.0
    assert fixed.loss_scale() == 64.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unscale_divides_and_notes_overflows(dtype: torch.dtype) -> None:
    scaler = LossScaler("dynamic", init_scale=8.0)
    grads = [torch.full((3,), 4.0, dtype=dtype), torch.full((2,), -2.0, dtype=dtype)]
    masters = [torch.empty(3), torch.empty(2)]
    scaler.unscale(grads, masters, None)  # type: ignore[arg-type]
    assert [m.tolist() for m in masters] == [[0.5] * 3, [-0.25] * 2] and not scaler.update_scale()
    assert grads[0].tolist() == [4.0] * 3
    scaler.unscale_with_stashed(grads, [torch.ones(3), torch.ones(2)], masters)
    assert [m.tolist() for m in masters] == [[1.5] * 3, [0.75] * 2]
    scaler.unscale(grads, masters, 1.0, scale_override=2.0)
    assert masters[0].tolist() == [2.0] * 3
    grads[1][0] = float("nan")
    scaler.unscale(grads, masters, 1.0)
    assert scaler._has_overflow and scaler.update_scale() and scaler.loss_scale() == 4.0


def test_at_the_floor_one_warning_names_the_parameter() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, min_loss_scale=2.0**15)
    with pytest.warns(UserWarning, match=r"floor 32768.*1\.weight \(1 of 2 values\)") as caught:
        for _ in range(4):
            loss = model(torch.ones(1, 2)).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                grad = model[1].weight.grad
                assert grad is not None
                grad[0, 0] = float("inf")
            optimizer.step()
    assert len(caught) == 1
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15


def test_a_thousand_overflows_do_not_bring_the_scale_to_zero() -> None:
    scaler = LossScaler("dynamic")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(1200):
            drive(scaler, overflow=True)
    assert scaler.loss_scale() == 2.0**-14


def test_scalers_can_be_pickled() -> None:
    scaler = LossScaler("dynamic")
    drive(scaler, overflow=True)
    scaler._scaler.name_parameters([("weight", torch.zeros(1))])
    copy = pickle.loads(pickle.dumps(scaler))
    assert copy.loss_scale() == 2.0**15 and not list(copy._scaler.named_parameters())


def test_old_scalers_find_overflows_and_scale() -> None:
    parameter = nn.Parameter(torch.ones(2))
    dynamic, static = fp16_utils.DynamicLossScaler(8.0), fp16_utils.LossScaler(4)
    assert dynamic.loss_scale == 8.0 and fp16_utils.DynamicLossScaler().loss_scale == 2.0**32
    (parameter * 2).sum().backward()
    assert not dynamic.has_overflow([parameter])
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert dynamic.has_overflow([parameter]) and not static.has_overflow([parameter])
    assert dynamic._has_inf_or_nan(parameter.grad)
    parameter.grad = None
    static.backward((parameter * 2).sum())
    found = gradient(parameter)
    assert found is not None and found.tolist() == [8.0, 8.0]
    static.update_scale(True)
    (scaled, none) = static.scale_gradient(nn.Identity(), (torch.ones(1), None), None)
    assert float(scaled) == 4.0 and none is None
    static.cur_scale = 2.0
    assert static.loss_scale == 2.0


def test_the_rule_is_the_cores_preset() -> None:
    mine, preset = LossScaler("dynamic")._scaler.rule, hs.GradScaler(rule="apex").rule
    assert (mine.init, mine.growth, mine.backoff, mine.interval, mine.ceiling) == (
        preset.init,
        preset.growth,
        preset.backoff,
        preset.interval,
        preset.ceiling,
    )
