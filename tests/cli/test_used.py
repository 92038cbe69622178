from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.cli.ops import used_operators
from tests.tasks.small import small_task


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x)
        return F.softmax(y, -1).double().exp()  # fp64 is never touched


def attention_task() -> hs.Task:
    return dataclasses.replace(
        small_task(),
        model=Attention,
        batches=lambda seed, step: (torch.ones(3, 2, 8),),
        loss_fn=lambda model, x: model(x).float().sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters()),
    )


def test_operators_are_counted_with_the_format_they_give() -> None:
    used = used_operators(small_task(), hs.Policy.of("mixed", dtype="bf16"), "cpu")
    assert used["linear"] == {"low": 2}
    assert used["mse_loss"] == {"fp32": 1}
    assert used.keys() == {"linear", "relu", "dropout", "mse_loss"}


def test_fp16_shows_the_operators_of_the_model_and_not_those_of_its_emulation() -> None:
    policies = [hs.Policy.of("O2", dtype=dtype, emulate="auto") for dtype in ("bf16", "fp16")]
    first, second = (used_operators(small_task(), policy, "cpu") for policy in policies)
    assert first == second


def test_composites_are_taken_apart_and_fp64_is_shown_as_it_is() -> None:
    used = used_operators(attention_task(), hs.Policy.of("mixed", dtype="bf16"), "cpu")
    assert "multi_head_attention_forward" not in used
    assert used["linear"].total() == 2 and used["bmm"] == {"low": 2} and used["softmax"].total() == 2
    assert used["exp"] == {"float64": 1}


def test_where_nothing_is_lowered_all_is_fp32() -> None:
    used = used_operators(small_task(), hs.Policy.of("O0"), "cpu")
    assert all(set(found) == {"fp32"} for found in used.values())


def test_counting_leaves_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    used_operators(small_task(), hs.Policy.of("O0"), "cpu")
    assert bool((torch.get_rng_state() == before).all())
