"""The recipes for parts of a model: each runs, and its rule brings log-probabilities nearer to float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from benchmarks.invariance import OPERATORS, found
from benchmarks.recipes import RECIPES, Recurrence, balance, errors, held_out, loss_fn, pair, trained

ROOT = Path(__file__).parent.parent.parent

AT_MOST = {"LM head": 0.9, "tied head": 0.9}
"""Recipe -> the largest ratio of errors with its rule and without; 1 where the part adds less than the weights."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_rule_brings_log_probabilities_nearer_to_float64(name: str) -> None:
    without, ruled = errors(RECIPES[name], trained(RECIPES[name], 40))
    assert 0 < ruled <= AT_MOST.get(name, 1.0) * without


def test_the_state_of_a_scan_is_fp32_under_the_rule() -> None:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrence, self.gain = Recurrence(), nn.Parameter(torch.ones(1))

        def forward(self, decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.recurrence(decay, x)  # type: ignore[no-any-return]

    decay, x = torch.rand(4, 64, 8).bfloat16() * 0.1 + 0.9, torch.randn(4, 64, 8).bfloat16()
    exact = Recurrence()(decay.double(), x.double())
    apart = []
    for rules in ({}, {"recurrence": "fp32"}):
        policy = hs.Policy.of("O2", dtype="bf16", outputs="keep").with_modules(rules)
        model = hs.prepare(Scan(), policy=policy)
        apart.append(float((model(decay, x).double() - exact).abs().mean()))
    assert 0 < apart[1] < 2**-12 * apart[0]  # fp32 has 16 bits more; a few are left for other values of the states


def test_attention_gets_low_q_and_k_behind_fp32_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        given.append((q.dtype, k.dtype, v.dtype))
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    _, model = pair(RECIPES["RoPE tables"], RECIPES["RoPE tables"].make())
    model(held_out()[0][:1])
    assert given == [(torch.bfloat16,) * 3] * 2
    tables = [buffer.dtype for name, buffer in model.named_buffers() if name.endswith("cos")]
    assert tables == [torch.float32] * 2


def test_the_balancing_bias_stays_fp32_and_moves() -> None:
    model = RECIPES["router"].make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = hs.Policy.of("O2", dtype="bf16").with_modules(RECIPES["router"].rule)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy)
    tokens, targets = held_out()
    for _ in range(3):
        step(tokens[:4], targets[:4])
    bias = dict(model.named_buffers())["blocks.0.mlp.router.bias"]
    assert bias.dtype is torch.float32 and 1e-3 <= bias.abs().max() <= 4e-3
    assert dict(model.named_parameters())["blocks.0.mlp.router.gate.weight"].dtype is torch.float32
    assert dict(model.named_parameters())["blocks.0.mlp.up"].dtype is torch.bfloat16
    ends = balance()
    assert abs(ends["fp32"] - 1) < 1e-4 and ends["bf16"] == 0.5  # from there half an ulp is more than 0.001


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("op", OPERATORS)
def test_two_calls_of_an_operator_give_the_same_bits(op: str, form: str) -> None:
    assert found(op, form)["again"]


def test_norms_and_softmax_give_a_sample_the_same_bits_in_any_batch() -> None:
    for op in ("layer_norm", "rms_norm", "softmax"):
        for form in ("fp32", "bf16"):
            assert found(op, form)["batch"]


def test_the_committed_results_have_a_row_for_each() -> None:
    results = ROOT / "benchmarks" / "results"
    assert {row["recipe"] for row in json.loads((results / "recipes.json").read_text("utf-8"))["rows"]} == set(RECIPES)
