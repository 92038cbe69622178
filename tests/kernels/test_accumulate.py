"""add_low_: bit for bit torch's add_, in whatever layout and size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from halfstep.kernels.eager.low import PIECE, add_low_

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 1),
    "strided": lambda t: t[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, PIECE // 64, PIECE // 16 + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_gives_the_bits_of_add(layout: str, size: int, dtype: torch.dtype) -> None:
    arranged = LAYOUTS[layout]
    total, low = arranged(torch.randn(size, 8, 3, 5)), arranged(torch.randn(size, 8, 3, 5).to(dtype))
    expected = total.clone().add_(low)
    add_low_(total, low)
    assert torch.equal(total, expected)


def test_tensors_of_different_layout_are_added_by_place() -> None:
    total, low = torch.randn(1024, 256), torch.randn(256, 1024).bfloat16().t()
    expected = total + low
    add_low_(total, low)
    assert torch.equal(total, expected)


def test_what_is_not_finite_stays_so() -> None:
    total, low = torch.zeros(PIECE + 5), torch.zeros(PIECE + 5, dtype=torch.bfloat16)
    low[-1], low[0] = float("nan"), float("inf")
    add_low_(total, low)
    assert total[-1].isnan() and total[0].isinf() and not total[1:-1].any()
