"""Laws of the reference of norms and bf16 halves, and the eager implementations compared with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.kernels.choose import by_foreach, norms_for
from halfstep.kernels.eager import low as bits
from halfstep.kernels.reference import operators as reference

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
ULPS = 4  # of fp32: the twins sum in another order


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (33, 65), (4, 5, 6), (1000,)]


@pytest.mark.parametrize("dtype", [BF16, HALF, FP32])
@pytest.mark.parametrize("transposed", [False, True])
def test_norms_agree_with_float64(dtype: torch.dtype, transposed: bool) -> None:
    tensors = [make(s, dtype, i) for i, s in enumerate(SHAPES)]
    if transposed:
        tensors = [t.mT if t.dim() >= 2 else t for t in tensors]
    exact = torch.stack([t.double().norm() for t in tensors])
    for twin in (reference.norms, by_foreach, norms_for):
        got = twin(tensors)
        assert got.dtype is FP32 and got.shape == (len(tensors),)
        assert torch.all((got.double() - exact).abs() <= ULPS * 2.0**-23 * exact)
    assert math.isclose(
        float(reference.check_norms(norms_for(tensors), None, None)[0]), float(exact.norm()), rel_tol=1e-6
    )


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [BF16, HALF, FP32])
def test_one_bad_element_shows_in_its_tensor_alone(value: float, dtype: torch.dtype) -> None:
    tensors = [make((33,), dtype, i) for i in range(3)]
    tensors[1][5] = value
    for twin in (reference.norms, by_foreach):
        assert torch.isfinite(twin(tensors)).tolist() == [True, False, True]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11, about tensors it makes itself
def test_norms_of_odd_tensors() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (4,), check_invariants=True
    )
    got = norms_for([torch.zeros(0), sparse, torch.tensor([3 + 4j]), torch.full((4,), 2.0)])
    assert got.tolist() == [0.0, 5.0, 5.0, 4.0]
    assert norms_for([]).shape == (0,)
    assert torch.isfinite(norms_for([torch.full((1000,), 6e4, dtype=HALF)])).all()  # the sum is kept in fp32


def patterns() -> Tensor:
    """All fp32 patterns around every bf16: its neighbours, its halfway points and random ones."""
    high = torch.arange(65536, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    every = (high[:, None] | low).flatten()
    random = torch.randint(0, 2**32, (200_000,), generator=torch.Generator().manual_seed(0))
    both = torch.cat([every, random])
    return torch.where(both >= 2**31, both - 2**32, both).to(torch.int32).view(FP32)


def test_split_is_a_bijection() -> None:
    wide = patterns()
    low, remainder = reference.split_bf16(wide)
    again = reference.join_bf16(low, remainder)
    number = ~torch.isnan(wide)
    assert torch.equal(again[number].view(torch.int32), wide[number].view(torch.int32))
    assert torch.isnan(low[~number]).all() and torch.isnan(again[~number]).all()


def test_split_and_join_in_few_passes_are_the_reference() -> None:
    wide = patterns()
    number = ~torch.isnan(wide)
    low, remainder = bits.split_bf16(wide)
    want = reference.split_bf16(wide)
    assert torch.equal(low[number].view(torch.int16), want[0][number].view(torch.int16))
    assert torch.equal(remainder, want[1])
    again = bits.join_bf16(low, remainder)
    assert torch.equal(again[number].view(torch.int32), wide[number].view(torch.int32))
    assert torch.isnan(low[~number]).all() and torch.isnan(again[~number]).all()
    assert torch.isnan(bits.join_bf16(*want)[~number]).all()


@pytest.mark.parametrize("module", [bits, reference])
def test_halves_have_the_memory_layout_of_the_whole(module: Any) -> None:
    wide = make((4, 3, 2, 5), FP32).to(memory_format=torch.channels_last)
    low, remainder = module.split_bf16(wide)
    again = module.join_bf16(low, remainder)
    assert low.stride() == remainder.stride() == again.stride() == wide.stride() and torch.equal(again, wide)


def test_split_rounds_to_nearest() -> None:
    wide = make((10_000,), FP32)
    low, _ = reference.split_bf16(wide)
    assert torch.equal((low.float() - wide).abs(), (wide.bfloat16().float() - wide).abs())


def test_round_half_even_is_no_bijection() -> None:
    """The fault twin: with torch's own rounding some values do not come back."""
    wide = patterns()
    wide = wide[torch.isfinite(wide)]
    again = reference.join_bf16(wide.bfloat16(), reference.split_bf16(wide)[1])
    assert not torch.equal(again.view(torch.int32), wide.view(torch.int32))


def stochastic(wide: Tensor) -> Tensor:
    return reference.stochastic_bf16(wide, reference.noise(torch.tensor([0, 0]), 0, reference.WEIGHT, wide.numel()))


def test_stochastic_rounding_is_unbiased_and_stays_between_neighbours() -> None:
    value = 1.0 + 2**-9 + 2**-12  # between 1 and 1 + 2**-7
    rounded = stochastic(torch.full((200_000,), value)).double()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    spread = 2**-7 * math.sqrt(0.25 / 200_000)
    assert abs(float(rounded.mean()) - value) < 5 * spread
    exact = make((1000,), BF16).float()
    assert torch.equal(stochastic(exact).float(), exact)
    assert str(stochastic(torch.tensor([float("inf"), float("-inf"), float("nan")])).tolist()) == "[inf, -inf, nan]"
