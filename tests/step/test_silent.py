"""Failures that no step shows: each seeded fault is one line of the log, and its healthy twin none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs


def lines(
    caplog: pytest.LogCaptureFixture,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., Tensor],
    batch: Callable[[int], tuple[Any, ...]],
    updates: int = 64,
    **settings: Any,
) -> list[str]:
    """Train, and return what was logged."""
    caplog.clear()
    step = hs.TrainStep(model, optimizer, loss_fn, **{"policy": "O0", **settings})
    for number in range(updates * settings.get("accumulate", 1)):
        step(*batch(number))
    return [record.message for record in caplog.records if record.name == "halfstep"]


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def pairs(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    x = torch.randn(32, 16)
    return x, x[:, :4].sin()


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


# ---------------------------------------------------------------------- low parameters that stand still


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("rate", "told"), [(1e-5, True), (3e-3, False)])
def test_low_weights_that_swallow_their_updates_are_named(
    rate: float, told: bool, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = perceptron()
    policy = hs.Policy.of("O3", dtype="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    said = lines(caplog, model, optimizer, regress, pairs, policy=policy, accumulate=accumulate)
    if told:
        (text,) = said
        assert text.startswith("0.weight, 0.bias, 2.weight: hardly a number has moved since update ")
        assert "master='auto'" in text
    else:
        assert said == []


@pytest.mark.filterwarnings("ignore:gradients are not finite:UserWarning")
def test_an_overflow_at_a_look_hides_nothing_later(caplog: pytest.LogCaptureFixture) -> None:
    def loud(number: int) -> tuple[Tensor, Tensor]:
        x, y = pairs(number)
        return x, y * (1e6 if number == 1 else 1.0)

    model = perceptron()
    policy = hs.Policy.of("O3", dtype="fp16", scale=64.0)
    said = lines(caplog, model, torch.optim.SGD(model.parameters(), 1e-6), regress, loud, policy=policy)
    assert ["hardly a number has moved" in text for text in said].count(True) == 1


@pytest.mark.parametrize("master", ["master", "stochastic", "kahan", "split"])
def test_precise_weights_behind_low_ones_may_stand_still(master: str, caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron()
    policy = hs.Policy.of("O3", dtype="bf16", master=master)
    assert lines(caplog, model, torch.optim.AdamW(model.parameters(), 1e-5), regress, pairs, policy=policy) == []


def schedules(optimizer: torch.optim.Optimizer, kind: str) -> Any:
    if kind == "warming up":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 10_000)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 72)


@pytest.mark.parametrize("kind", ["warming up", "ending"])
def test_a_learning_rate_near_zero_is_no_fault(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scheduler = schedules(optimizer, kind)
    assert lines(caplog, model, optimizer, regress, cast, 192, policy="O3", scheduler=scheduler) == []


def cast(number: int) -> tuple[Tensor, Tensor]:
    x, y = pairs(number)
    return x.bfloat16(), y


class Words(nn.Module):
    """An embedding of which most rows are never seen, and a bias before BatchNorm, whose gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.mix, self.norm, self.out = (
            nn.Embedding(500, 16),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 4),
        )

    def forward(self, words: Tensor) -> Any:
        return self.out(torch.relu(self.norm(self.mix(self.rows(words).mean(1)))))


def test_rows_that_are_not_seen_and_gradients_of_rounding_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    def words(number: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(number)
        x = torch.randint(0, 20, (32, 6))
        return x, F.one_hot(x[:, 0] % 4, 4).float()

    model = Words().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    assert lines(caplog, model, optimizer, regress, words, 128, policy="O3") == []


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize(("rate", "told"), [(1e-6, True), (2e-3, False)])
def test_adapters_in_bf16(rate: float, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Adapted().bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad]
    said = lines(caplog, model, torch.optim.AdamW(trained, rate), regress, cast, 128, policy="O3")
    assert [text.partition(":")[0] for text in said] == (["a.weight"] if told else [])


# ---------------------------------------------------------------------- buffers


class Keeps(nn.Module):
    """A layer with what is kept from step to step in a format."""

    seen: Tensor
    calls = 0

    def __init__(self, form: torch.dtype, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(16, 4), kind
        self.register_buffer("seen", torch.zeros(3 if kind == "average" else 1, dtype=form), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.layer(x)
        with torch.no_grad():
            if self.kind == "counter":
                self.seen += 1
            elif self.kind == "replaced":
                self.seen = self.seen + 1
            elif self.kind == "average":
                self.seen.lerp_((2.0 + 0.1 * x[0, :3]).to(self.seen.dtype), 0.001)
            elif self.kind == "warmth":  # it falls to a floor
                self.seen.copy_((1.0 - 0.02 * self.seen.new_tensor(float(self.calls))).clamp(min=0.5))
            elif self.kind == "converged":
                self.seen.lerp_(torch.ones_like(self.seen), 0.2)
            elif self.kind == "constant":
                self.seen.fill_(3.0)
        return y


SWALLOWING, OTHERS = ("counter", "replaced", "average"), ("warmth", "converged", "constant")
KEPT = [(kind, torch.bfloat16) for kind in SWALLOWING + OTHERS] + [(kind, torch.float32) for kind in SWALLOWING]


@pytest.mark.parametrize(("kind", "form"), KEPT, ids=lambda value: str(value).removeprefix("torch."))
def test_running_sums_that_swallow_their_terms_are_named(
    kind: str, form: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = Keeps(form, kind)
    said = lines(caplog, model, torch.optim.SGD(model.parameters(), 0.01), regress, pairs, 640, policy="O0")
    if form is torch.bfloat16 and kind in SWALLOWING:
        (text,) = said
        assert text.startswith("buffer seen has stopped moving before step ") and "fp32" in text
    else:
        assert said == []


class Spoiled(nn.Module):
    def __init__(self, value: Tensor, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.steps, self.spoils = nn.Linear(16, 4), 0, True
        if frozen:
            self.kept = nn.Parameter(value, requires_grad=False)
        else:
            self.register_buffer("kept", value, persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        with torch.no_grad():
            self.kept.fill_(math.inf if self.spoils and self.steps >= 3 else 1.0)
        return self.layer(x)


VALUES = {
    "fp32": torch.ones(3), "bf16": torch.ones(3).bfloat16(), "fp16": torch.ones(()).half(),
    "fp64, large": torch.full((3,), 1e300, dtype=torch.float64), "complex": torch.ones(3, dtype=torch.complex64),
    "not contiguous": torch.ones(3, 4).t(),
}  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"blackbox": False}], ids=str)
@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
@pytest.mark.parametrize("spoils", [True, False])
def test_every_kind_of_buffer_is_looked_at(
    spoils: bool, value: Tensor, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Spoiled(value.clone(memory_format=torch.preserve_format))
    model.spoils = spoils
    said = lines(caplog, model, torch.optim.SGD(model.parameters(), 0.01), regress, pairs, 16, **settings)
    assert [text.partition(" before")[0] for text in said] == ["buffer kept is not finite any more"] * spoils


def test_a_frozen_parameter_that_is_written_to_is_looked_at_too(caplog: pytest.LogCaptureFixture) -> None:
    model = Spoiled(torch.ones(3), frozen=True)
    (text,) = lines(caplog, model, torch.optim.SGD(model.layer.parameters(), 0.01), regress, pairs, 16)
    assert text.startswith("buffer kept is not finite any more before step ")


class Masks(nn.Module):
    """Makes its mask anew for longer sequences."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 4)
        self.register_buffer("mask", torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Any:
        if len(x) != len(self.mask):
            self.mask = torch.full((len(x), len(x)), -math.inf).triu(1)
        return (torch.softmax(self.mask, -1) @ self.layer(x)).float()


def test_a_mask_of_another_shape_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    def growing(number: int) -> tuple[Tensor, Tensor]:
        x, y = pairs(number)
        return x[: 1 + number], y[: 1 + number]

    model = Masks()
    assert lines(caplog, model, torch.optim.SGD(model.parameters(), 0.01), regress, growing, 16) == []


# ---------------------------------------------------------------------- modules that return one number


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class Branches(nn.Module):
    """A network with parts whose gradients are 0 for a while, or for ever, on purpose."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.out = kind, nn.Linear(16, 32), nn.Linear(32, 4)
        last = nn.Linear(32, 32)
        self.branch = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), last)
        self.gate, self.drop = nn.Parameter(torch.zeros(1)), nn.Dropout(1.0)
        if kind == "adapter":
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        if self.kind == "gate":
            h = h + self.gate.detach() * self.branch(h)  # a gate that is not opened
        elif self.kind == "drop":
            h = h + self.drop(self.branch(h))
        elif self.kind == "unused":
            h = h + 0.0 * self.branch(h)
        elif self.kind == "adapter":
            h = h + self.branch(h)
        return self.out(h.tanh())


CLOSED = [("gate", "O0"), ("drop", "O0"), ("unused", "O0"), ("adapter", "O0"), ("adapter", "O2")]


@pytest.mark.parametrize(("kind", "policy"), CLOSED)
def test_branches_that_are_closed_on_purpose_are_no_fault(
    kind: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Branches(kind)
    if kind == "adapter":
        model.branch[2].requires_grad_(False)  # stays 0
    assert lines(caplog, model, torch.optim.SGD(model.parameters(), 0.01), regress, pairs, 256, policy=policy) == []


@pytest.mark.parametrize("scale", [3000.0, 1.0])
def test_a_norm_whose_squares_overflow_is_named(scale: float, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    first = nn.Linear(16, 64)
    model = nn.Sequential(first, RootMeanSquare(64), nn.Linear(64, 4)).half()
    with torch.no_grad():
        first.weight.mul_(scale)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, y = pairs(number)
        return (x.sign() * (1.0 + x.abs())).half(), y

    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    policy = hs.Policy.of("O3", dtype="fp16", scale=1.0)
    said = lines(caplog, model, optimizer, regress, batch, 128, policy=policy)
    found = [text for text in said if "returns one number everywhere" in text]
    if scale == 1.0:
        assert said == []
    else:
        assert found and found[0].startswith("1 (RootMeanSquare) returns one number everywhere, and gradients of ")


@pytest.mark.parametrize("bias", [-100.0, 0.0])
def test_a_dead_layer_is_named_by_the_first_module_that_is_flat(bias: float, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    first = nn.Linear(16, 32)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        first.bias.add_(bias)
    said = lines(caplog, model, torch.optim.SGD(model.parameters(), 0.01), regress, pairs, 128)
    if bias:
        (text,) = said
        assert text.startswith("1 (ReLU) returns one number everywhere, and gradients of 0.weight, 0.bias, 2.weight ")
    else:
        assert said == []


@pytest.mark.parametrize("scale", [1.0, "auto"])
def test_gradients_that_vanish_in_fp16_are_told(scale: Any, caplog: pytest.LogCaptureFixture) -> None:
    def tiny(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return 1e-8 * F.mse_loss(model(x), y)

    model = perceptron()
    policy = hs.Policy.of("O2", dtype="fp16", scale=scale)
    said = lines(caplog, model, torch.optim.SGD(model.parameters(), 0.1), tiny, pairs, 64, policy=policy)
    assert ["all gradients have been 0" in text for text in said] == ([True] if scale == 1.0 else [])


def test_nothing_is_a_part_of_a_step_between_looks() -> None:
    model = perceptron()
    step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 0.01), regress, policy="O0")
    for number in range(5):
        step(*pairs(number))
    assert step.record.signals.learning not in step.parts
    assert not any(module._forward_hooks for module in model.modules())


def test_a_compiled_step_is_looked_at_too(caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron()
    model.register_buffer("kept", torch.ones(2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    policy = hs.Policy.of("O3", dtype="bf16")
    step = hs.TrainStep(model, optimizer, regress, policy=policy, compile={"backend": "eager"})
    for number in range(64):
        step(*pairs(number))
        if number == 20:
            model.get_buffer("kept").fill_(math.nan)
    first, second = [record.message for record in caplog.records if record.name == "halfstep"]
    assert first.startswith("buffer kept is not finite any more before step 32: ")
    assert second.startswith("0.weight, 0.bias, 2.weight: hardly a number has moved since update 1, ")
