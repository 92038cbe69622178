"""Tensors for the operators that count exponents, shared by the tests of all their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors(dtype: torch.dtype, size: int) -> list[Tensor]:
    """Return random bits, numbers with zeros among them, subnormals, powers of two, and strided ones, of `dtype`."""
    generator = torch.Generator().manual_seed(size)
    word = WORDS[dtype.itemsize]
    limits = torch.iinfo(word)
    bits = torch.randint(limits.min, limits.max, (size,), generator=generator, dtype=word)
    numbers = torch.randn(size, generator=generator).to(dtype)
    numbers[::7], numbers[::11] = 0.0, -0.0
    tiny = torch.randn(size, generator=generator, dtype=torch.float64) * torch.finfo(dtype).smallest_normal / 9
    powers = torch.ldexp(
        torch.ones(size, dtype=torch.float64), torch.randint(-1074, 1024, (size,), generator=generator)
    )
    strided = torch.randn(size, 2, generator=generator).to(dtype)[:, 1]
    return [bits.view(dtype), numbers, tiny.to(dtype), powers.to(dtype), strided, torch.full((size,), -1.5).to(dtype)]
