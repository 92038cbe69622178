"""The meaning of each numeric primitive, in plain PyTorch and one tensor at a time. Twins are tested against these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["join_bf16", "norms", "split_bf16", "stochastic_round", "total_norm"]

HALF_ULP = 0x8000  # half of the lowest bit that bf16 keeps of an fp32 pattern


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, accumulated in fp32.

    Args:
        tensors: floating or complex, dense or sparse, any shapes; an empty one has norm 0.

    Returns:
        (len(tensors),) fp32 on the first tensor's device. A tensor with a nan gives nan, one with an inf gives inf.
    """
    if not tensors:
        return torch.zeros(0)
    device = tensors[0].device
    each = []
    for tensor in tensors:
        dense = tensor.coalesce().values() if tensor.is_sparse else tensor.detach()
        values = torch.view_as_real(dense) if dense.is_complex() else dense
        values = values if values.dtype is torch.float64 else values.float()
        each.append(torch.linalg.vector_norm(values).float().to(device))
    return torch.stack(each)


def total_norm(norms: Tensor) -> Tensor:
    """Return the 2-norm over all tensors from their norms: (n,) fp32 -> 0-dim fp32."""
    total: Tensor = torch.linalg.vector_norm(norms)
    return total


def split_bf16(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into bf16 and a 16-bit remainder that together are the fp32 bits.

    Rounds half up on the bit pattern, ``low = (bits + 0x8000) >> 16``: with round-half-even one even bf16 would stand
    for 65,537 fp32 values, one more than a remainder has. NaN keeps its upper half, made quiet so that it stays NaN.

    Args:
        wide: fp32, any shape.

    Returns:
        (bf16, int16), both of the shape of `wide`.
    """
    bits = wide.detach().view(torch.int32)
    nan = torch.isnan(wide)
    rounded = torch.where(nan, bits, bits + HALF_ULP)
    high = (rounded >> 16).to(torch.int16)
    quiet = torch.where(nan, high | 0x40, high)  # 0x40: the quiet bit of a bf16 NaN
    remainder = (bits & 0xFFFF).to(torch.int32)
    return quiet.view(torch.bfloat16), remainder.to(torch.int16)


def join_bf16(low: Tensor, remainder: Tensor) -> Tensor:
    """Rebuild fp32 from `split_bf16`'s halves, bit for bit except for the payload of signalling NaNs.

    Args:
        low: bf16.
        remainder: int16 of the same shape: the lower half of the fp32 pattern.
    """
    lower = remainder.to(torch.int32) & 0xFFFF
    nan = torch.isnan(low)
    rounded_up = (lower >= HALF_ULP) & ~nan  # then the upper half was counted one too high
    high = low.view(torch.int16).to(torch.int32) - rounded_up.to(torch.int32)
    return ((high << 16) | lower).view(torch.float32)


def stochastic_round(wide: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 to bf16, up with the probability of the fraction cut off, so that the mean is the value itself.

    Adds 16 random bits below bf16's lowest bit and truncates. Values bf16 can hold stay; inf and NaN stay.

    Args:
        wide: fp32, any shape.
        generator: source of the random bits; default: torch's.

    Returns:
        bf16 of the same shape.
    """
    bits = wide.detach().view(torch.int32)
    noise = torch.randint(0, 1 << 16, wide.shape, generator=generator, device=wide.device, dtype=torch.int32)
    special = ~torch.isfinite(wide)
    cut = torch.where(special, bits, bits + noise) & ~0xFFFF
    return cut.view(torch.float32).to(torch.bfloat16)
