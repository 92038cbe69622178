"""Probes: the chain of exceptions that given errors lead to, and errors of real gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.advise.tune.calibration import Calibration, chain, gradient_error, gradients, options
from halfstep.advise.tune.result import Change
from halfstep.tasks.task import Task
from tests.advise.tune.fake import spot

PURE = hs.Policy.of("pure", dtype="bf16")


def rule(pattern: str, cost: float = 0.1) -> tuple[float, Change]:
    return cost, Change(field="modules", pattern=pattern, value="fp32", why="")


INPUTS = (0.0, Change(field="inputs", pattern="", value="keep", why=""))


def error_of(**factors: float) -> Callable[[hs.Policy], float]:
    """Return an error that each exception multiplies by its factor."""

    def error(policy: hs.Policy) -> float:
        value = 1.0
        for name, factor in factors.items():
            there = policy.inputs == "keep" if name == "inputs" else (name, "fp32") in policy.modules
            value *= factor if there else 1.0
        return value

    return error


def names(made: list[Change]) -> list[str]:
    return [remedy.pattern or remedy.field for remedy in made]


def test_the_most_effective_come_first_until_none_is_worth_it() -> None:
    error = error_of(a=0.6, b=0.3, c=0.9, inputs=0.7)
    made = chain(error, PURE, [rule("a"), rule("b"), rule("c"), INPUTS])
    assert names(made) == ["b", "a", "inputs"]
    assert made[0].why == "brings the error of the gradients from 1 to 0.3"
    assert made[1].why == "brings the error of the gradients from 0.3 to 0.18"


def test_of_equally_good_ones_the_one_that_concerns_least_time_is_taken_and_a_small_error_ends_it() -> None:
    made = chain(error_of(a=0.04, b=0.042, c=0.2), PURE, [rule("a", 0.4), rule("b", 0.1), rule("c", 0.0)])
    assert names(made) == ["b"]


def test_a_pair_is_found_where_neither_helps_alone() -> None:
    def error(policy: hs.Policy) -> float:
        return 0.01 if policy.inputs == "keep" and ("a", "fp32") in policy.modules else 1.0

    assert names(chain(error, PURE, [rule("a"), rule("b"), INPUTS])) == ["inputs", "a"]


@pytest.mark.parametrize("error", [lambda policy: math.nan, lambda policy: 1.0, lambda policy: 0.01])
def test_nothing_is_proposed_without_measurement_without_effect_and_without_need(
    error: Callable[[hs.Policy], float],
) -> None:
    assert chain(error, PURE, [rule("a"), INPUTS]) == []


def test_options_are_fields_operators_classes_and_modules_but_none_that_is_most_of_the_model() -> None:
    spots = (
        spot("linear", "blocks.0.up", time=0.7), spot("matmul", "", kind="Net", time=0.2),
        spot("softmax", "blocks.0", kind="Block", time=0.1),
    )  # fmt: skip
    found = options(Calibration(spots=spots), PURE, [])  # nearly all of the model is below blocks.0, a Block
    assert [(r.field, r.pattern or r.value) for _, r in found] == [
        ("inputs", "keep"), ("residual", "fp32"), ("norms", "fp32"), ("ops", "matmul"), ("ops", "softmax"),
    ]  # fmt: skip
    mixed = hs.Policy.of("mixed", dtype="bf16")
    assert all(r.pattern for _, r in options(Calibration(spots=spots), mixed, []))  # its fields are so already


# ------------------------------------------------------------------ real gradients


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - 1000.0)  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]  # module calls are Any


TASK = Task(
    name="offset", model=Offset, batches=lambda seed, step: (1000 + torch.randn(16, 8),), loss_fn=loss_fn,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)  # fmt: skip


def test_low_inputs_around_a_level_are_found_and_the_model_stays_as_it_was() -> None:
    torch.manual_seed(0)
    model, batch = Offset(), TASK.batches(0, 0)
    before, drawn = model.layer.weight.clone(), torch.random.get_rng_state()
    wide = gradients(TASK, model, batch, None)
    assert [g.shape for g in wide] == [(1, 8), (1,)]

    def error(policy: hs.Policy) -> float:
        return gradient_error(TASK, model, batch, policy, wide)

    assert error(hs.Policy.of("O0")) == 0.0
    assert error(hs.Policy.of("mixed", dtype="bf16")) < 0.02 < 0.2 < error(PURE)
    assert names(chain(error, PURE, options(Calibration(), PURE, []))) == ["inputs"]
    assert torch.equal(model.layer.weight, before) and model.layer.weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_gradients_in_fp16_are_unscaled_and_those_that_are_not_finite_count_as_wrong() -> None:
    torch.manual_seed(0)
    model, batch = Offset(), (1000 + torch.randn(16, 8),)
    wide = gradients(TASK, model, batch, None)
    assert gradient_error(TASK, model, batch, hs.Policy.of("mixed", dtype="fp16"), wide) < 0.01
    assert gradient_error(TASK, model, (batch[0] * math.inf,), PURE, wide) == 1.0
