"""stochastic: right on average, repeatable from a seed, and the same on every replica."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import WeightsError
from halfstep.weights.strategies import StochasticWeights

BF16, HALF = torch.bfloat16, torch.float16
COUNT = 20_000


def trained(
    size: float, steps: int, *, low: torch.dtype = BF16, seed: int = 0, count: int = COUNT
) -> tuple[Tensor, StochasticWeights]:
    """Add `size` to weights of 1 so many times and return them."""
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.ones(count))
    store = StochasticWeights([("p", parameter)], low)
    optimizer = torch.optim.SGD([parameter], 1.0)
    for _ in range(steps):
        parameter.grad = torch.full((count,), -size, dtype=low)
        optimizer.step()
    return store.read(parameter), store


@pytest.mark.parametrize(("low", "ulp"), [(BF16, 2.0**-7), (HALF, 2.0**-10)])
@pytest.mark.parametrize("fraction", [0.125, 0.5, 0.875])
def test_the_mean_is_the_value(low: torch.dtype, ulp: float, fraction: float) -> None:
    """Each step moves a weight one ulp with chance `fraction`; the mean is within 5 standard deviations (6e-7)."""
    steps = 40
    values, _ = trained(fraction * ulp, steps, low=low)
    deviation = ulp * math.sqrt(steps * fraction * (1 - fraction) / COUNT)
    assert abs(float(values.double().mean()) - (1 + steps * fraction * ulp)) < 5 * deviation
    spread = float(values.double().var()) / (ulp**2 * steps * fraction * (1 - fraction))
    assert abs(spread - 1) < 5 * math.sqrt(2 / COUNT), "and the weights are independent of each other"


def test_rounding_to_nearest_would_stand_still() -> None:
    """The fault twin: the mean of weights rounded to nearest misses by far more than the bound above."""
    parameter = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = torch.optim.SGD([parameter], 1.0)
    for _ in range(40):
        parameter.grad = torch.full((8,), -(2.0**-10), dtype=BF16)
        optimizer.step()
    assert torch.equal(parameter, torch.ones(8, dtype=BF16))


def test_a_seed_repeats_a_run() -> None:
    first, second, other = (trained(2.0**-10, 5, seed=seed, count=1000)[0] for seed in (3, 3, 4))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_it_leaves_torchs_generator_alone() -> None:
    _, store = trained(2.0**-10, 1, count=10)
    before = torch.get_rng_state()
    parameter = next(store.parameters())
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], 1.0).step()
    assert torch.equal(torch.get_rng_state(), before)


def test_replicas_draw_the_same_bits_whatever_their_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    first, second = (trained(2.0**-10, 5, seed=seed, count=1000)[0] for seed in (3, 4))
    assert torch.equal(first, second)


def test_only_steps_round_by_chance() -> None:
    _, store = trained(2.0**-10, 1, count=1000)
    parameter = next(store.parameters())
    before = store.draws.state()
    store.assign(parameter, torch.full((1000,), 1 + 2.0**-9))
    assert torch.equal(store.read(parameter), torch.ones(1000))
    assert store.draws.state() == before


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    _, store = trained(2.0**-10, 1, count=10)
    before = store.draws.state()
    for wrong in (
        {},
        {"seed": 1},
        {"seed": 1, "counts": {"cpu": [1]}},
        {"seed": 1, "counts": 7},
        {"seed": 1, "counts": {"x": [1, 2]}},
    ):
        with pytest.raises(WeightsError, match="stochastic rounding does not fit here"):
            store.draws.load_state(wrong)
        assert store.draws.state() == before
