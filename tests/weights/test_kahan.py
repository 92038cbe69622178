"""kahan: updates that a low weight alone would lose are kept until they count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep.weights.strategies import KahanWeights

BF16, HALF = torch.bfloat16, torch.float16


def summed(low: torch.dtype, *, compensated: bool, steps: int, size: float) -> tuple[float, float]:
    """Add `size` to 1 so many times; return the low weight and its precise value."""
    parameter = nn.Parameter(torch.ones(1, dtype=low))
    store = KahanWeights([("p", parameter)] if compensated else [], low)
    optimizer = torch.optim.SGD([parameter], 1.0)
    for _ in range(steps):
        parameter.grad = torch.full((1,), -size, dtype=low)
        optimizer.step()
    low_value = Tensor.detach(parameter).item()  # `parameter.item()` reads the precise one
    return low_value, store.read(parameter).item() if compensated else low_value


@pytest.mark.parametrize(("low", "size"), [(BF16, 2.0**-12), (HALF, 2.0**-16)])
def test_a_sum_that_the_low_format_loses_is_exact(low: torch.dtype, size: float) -> None:
    plain, _ = summed(low, compensated=False, steps=1000, size=size)
    weight, precise = summed(low, compensated=True, steps=1000, size=size)
    want = 1 + 1000 * size
    assert plain == 1.0  # the fault twin: each update is below half an ulp
    assert precise == want and weight == float(torch.tensor(want).to(low))


@pytest.mark.parametrize(("low", "bits"), [(BF16, 16), (HALF, 22)])
def test_values_have_the_significant_bits_of_its_docstring(low: torch.dtype, bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100_000, generator=generator).abs() + 0.01
    parameter = nn.Parameter(values.clone())
    store = KahanWeights([("p", parameter)], low)
    error = (store.read(parameter) - values).abs()
    bound = (values * 2.0**-bits).clamp(min=2.0**-25 if low is HALF else 0.0)
    assert (error <= bound).all()
    assert (error > bound / 8).any(), "and the bound is not idle"


def test_the_two_parts_are_the_nearest_low_numbers() -> None:
    wide = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(wide.clone())
    store = KahanWeights([("p", parameter)], BF16)
    precise = store.read(parameter)
    assert torch.equal(parameter, precise.to(BF16))
    assert torch.equal(next(store.kept()).float(), precise - Tensor.detach(parameter).float())


def test_what_leaves_the_range_is_inf_and_not_nan() -> None:
    parameter = nn.Parameter(torch.tensor([65_519.0, 65_520.0, -1e6]))
    store = KahanWeights([("p", parameter)], HALF)
    assert store.read(parameter).tolist() == [65_519.0, float("inf"), float("-inf")]
