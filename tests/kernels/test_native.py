"""The compiled CPU kernels: bit-equal to `updates`, whatever the formats, the sizes and the number of threads."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.kernels import native, ops, reference, updates

REASON = native.why_not()
compiled = pytest.mark.skipif(bool(REASON), reason=REASON)

FP32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
SIZES = (1, 0, 7, 4097, 100_003)
FORMS = [
    ("plain", FP32, None),
    ("plain", BF16, None),
    ("plain", HALF, None),
    ("copy", FP32, BF16),
    ("copy", FP32, HALF),
    ("split", BF16, torch.int16),
    ("kahan", BF16, BF16),
    ("kahan", HALF, HALF),
    ("stochastic", BF16, None),
]
SPECIAL = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-42, 3.38e38, 65519.0, 65520.0, 6e-8, 1e-8])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two threads, as CI has; tests that change the number leave it as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def patterns(tensor: Tensor) -> Tensor:
    """Bits to compare; all NaN are one."""
    if tensor.dtype is torch.int16:
        return tensor
    bits = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
    return torch.where(tensor.isnan(), torch.full_like(bits, 0x7FC0), bits)


@dataclass(kw_only=True)
class Model:
    """Parameters in one form with everything an update reads and writes."""

    form: str
    weights: list[Tensor] = field(default_factory=list)
    beside: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    factor: Tensor = field(default_factory=lambda: torch.tensor(0.37))
    bad: Tensor = field(default_factory=lambda: torch.tensor(False))
    draws: Tensor = field(default_factory=lambda: torch.tensor([-(2**61) + 12345, 2**33 + 3]))
    start: int = 5

    def copy(self) -> Model:
        lists = {k: [t.clone() for t in v] if isinstance(v, list) else v for k, v in vars(self).items()}
        return Model(**lists)

    def written(self) -> list[Tensor]:
        return [*self.weights, *self.beside, *self.first, *self.second, *self.steps]

    def given(self, rate: Tensor | None = None) -> tuple[Any, ...]:
        return (self.gradients, self.factor, self.bad, self.draws, self.start, self.form, rate)


def make(
    form: str,
    low: torch.dtype,
    beside: torch.dtype | None,
    gradient: torch.dtype = FP32,
    state: torch.dtype = FP32,
    *,
    sizes: tuple[int, ...] = SIZES,
    special: bool = False,
) -> Model:
    draw = torch.Generator().manual_seed(len(form) + 8 * len(sizes))
    model = Model(form=form)
    for n, size in enumerate(sizes):
        values = torch.randn(size, generator=draw) * 10.0 ** (torch.rand(size, generator=draw) * 6 - 4)
        if special and size > 4 * len(SPECIAL):
            values[: len(SPECIAL)] = SPECIAL
        if form == "split":
            halves = reference.split_bf16(values)
            model.weights.append(halves[0])
            model.beside.append(halves[1])
        else:
            model.weights.append(values.to(low))
            if beside is not None:
                rest = values - values.to(beside).float() if form == "kahan" else values
                model.beside.append(rest.nan_to_num(0.0, 0.0, 0.0).to(beside))
        model.gradients.append(torch.randn(size, generator=draw).to(gradient))
        model.first.append((torch.randn(size, generator=draw) * 0.1).to(state))
        model.second.append((torch.randn(size, generator=draw) ** 2 * 0.01).to(state))
        model.steps.append(torch.tensor(float(n % 2) * 6))
    return model


def noises(model: Model, n: int, streams: int) -> list[Tensor | None]:
    return [updates.noise(model.draws, model.start + n, s, model.weights[n].numel()) for s in range(streams)]


def expected(model: Model, optimizer: str, lr: float, settings: dict[str, Any]) -> Model:
    """What `updates` makes of a copy of `model`."""
    model = model.copy()
    for n, weight in enumerate(model.weights):
        beside = model.beside[n] if model.beside else None
        shared = (model.gradients[n], model.factor, noises(model, n, 3), model.form, lr)
        first = model.first[n] if model.first else None
        if optimizer == "adam_":
            assert first is not None
            updates.adam_(weight, beside, first, model.second[n], model.steps[n], *shared, **settings)
        elif optimizer == "sgd_":
            updates.sgd_(weight, beside, first, *shared, **settings)
        else:
            assert first is not None
            updates.lion_(weight, beside, first, *shared, **settings)
    return model


def run(model: Model, optimizer: str, lr: float, settings: dict[str, Any], rate: Tensor | None = None) -> Model:
    """What the operator makes of a copy of `model`."""
    model = model.copy()
    lists = [model.weights, model.beside, model.first]
    if optimizer == "adam_":
        lists += [model.second, model.steps]
    getattr(ops, optimizer)(*lists, *model.given(rate), lr, *settings.values())
    return model


def same(one: Model, other: Model) -> bool:
    pairs = zip(one.written(), other.written(), strict=True)
    return all(a.dtype is b.dtype and torch.equal(patterns(a), patterns(b)) for a, b in pairs)


ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True, "maximize": False}
SGD = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True, "maximize": False}
LION = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "maximize": False}
SETTINGS = {"adam_": ADAM, "sgd_": SGD, "lion_": LION}
VARIANTS = [
    ("adam_", {}),
    ("adam_", {"decoupled": False, "maximize": True}),
    ("adam_", {"decoupled": False, "weight_decay": 0.0}),
    ("sgd_", {}),
    ("sgd_", {"nesterov": False, "maximize": True}),
    ("sgd_", {"weight_decay": 0.0}),
    ("lion_", {}),
    ("lion_", {"maximize": True}),
]


@compiled
@pytest.mark.parametrize("gradient", [FP32, BF16, HALF])
@pytest.mark.parametrize("state", [FP32, BF16])
@pytest.mark.parametrize(("form", "low", "beside"), FORMS)
def test_every_update_is_bit_equal_to_its_meaning(
    form: str, low: torch.dtype, beside: torch.dtype | None, state: torch.dtype, gradient: torch.dtype
) -> None:
    model = make(form, low, beside, gradient, state, special=True)
    for optimizer, other in VARIANTS:
        settings = SETTINGS[optimizer] | other
        got = run(model, optimizer, 3e-3, settings)
        assert same(got, expected(model, optimizer, 3e-3, settings)), (optimizer, other)
        assert not same(got, model)
