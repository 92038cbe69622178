"""Seed and count of stochastic rounding are saved with the optimizers whose steps draw bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.weights.draws import ROUNDING

FIELDS: list[dict[str, Any]] = [{"master": "stochastic"}, {"state": "low"}, {"master": "stochastic", "state": "low"}]


def made(seed: int, **fields: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a prepared model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return hs.prepare(model, optimizer, policy=hs.Policy.of("pure", dtype="bf16", **fields))[:2]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
    """Train; return a copy of the weights."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether weights have the same bits."""
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("fields", FIELDS)
def test_a_loop_that_saves_model_and_optimizer_resumes_with_the_same_bits(fields: dict[str, Any]) -> None:
    model, optimizer = made(0, **fields)
    train(model, optimizer)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer)
    for known in (True, False):  # the law, and that it can fail
        other, resumed = made(1, **fields)
        other.load_state_dict(state[0])
        resumed.load_state_dict(state[1] if known else {k: v for k, v in state[1].items() if k != ROUNDING})
        assert equal(train(other, resumed), expected) is known


def test_an_optimizer_over_two_stores_saves_both() -> None:
    def two(seed: int) -> tuple[list[nn.Module], torch.optim.Optimizer]:
        models = [made(seed + i, master="stochastic")[0] for i in range(2)]
        optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-2)
        hs.prepare(models, optimizer, policy=hs.Policy.of("pure", dtype="bf16", master="stochastic"))
        return models, optimizer

    models, optimizer = two(0)
    whole = nn.Sequential(*models)
    train(whole, optimizer)
    state = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    expected = train(whole, optimizer)
    assert len(state[1][ROUNDING]) == 2
    models, optimizer = two(5)
    whole = nn.Sequential(*models)
    whole.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    assert equal(train(whole, optimizer), expected)


def test_nothing_is_added_where_nothing_is_drawn() -> None:
    model, optimizer = made(0, master="split")
    assert ROUNDING not in optimizer.state_dict()
    model, optimizer = made(0, master="stochastic")
    state = optimizer.state_dict()
    plain = torch.optim.AdamW(nn.Linear(8, 8).parameters())
    plain.load_state_dict(state)  # torch ignores it
    assert ROUNDING in state and ROUNDING not in plain.state_dict()
    hs.unprepare(model)
    assert ROUNDING not in optimizer.state_dict()
