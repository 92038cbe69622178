"""Counts of binary exponents: what a row of them holds, its meaning in plain PyTorch, and how rows are added.

A row is int64, ``ROW`` numbers, and all zero for no element:

    place                      what
    0 .. BINS - 1              finite elements with ``2**e <= |x| < 2**(e + 1)``, for e from LOWEST to HIGHEST
    POWERS .. POWERS + BINS    how many of these are powers of two: where rounding thresholds lie, ties are
    ZEROS, INFS, NANS          elements that are 0 or -0, infinite, nan
    NEGATIVES                  elements below 0, -inf among them, -0 and nan not
    LARGEST                    bits of the largest finite magnitude, as float64
    SMALLEST                   `TOP` minus the bits of the smallest non-zero magnitude, as float64; 0 if there is none

The first bin holds what is smaller too, the last one what is larger: only float64 has such numbers, and no format of
halfstep has a threshold near them. Powers of two are not counted apart in these two. Rows are added by adding the
counts and taking the maximum of the last two places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.errors import FormatError
from halfstep.formats import POLICY_DTYPES
from halfstep.kernels.sharded import local

LOWEST, HIGHEST = -192, 191
"""Exponents of the outermost bins: fp32 and what rounds to it at scales from 2**-40 to 2**40 lie inside."""

BINS = HIGHEST - LOWEST + 1
POWERS = BINS
ZEROS, INFS, NANS, NEGATIVES, LARGEST, SMALLEST = range(2 * BINS, 2 * BINS + 6)
ROW = 2 * BINS + 6
TOP = 0x7FF << 52
"""Bits of float64's infinity."""

DIRECT = POLICY_DTYPES | {torch.float64}
"""Formats that kernels read as they are."""


def rows(count: int, device: torch.device | str) -> Tensor:
    """Return `count` rows of no elements."""
    return torch.zeros(count, ROW, dtype=torch.int64, device=device)


def parts(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in a format that kernels read: parts of complex ones, fp8 as fp32; no gradient.

    Of a sparse tensor the elements that are there, of a sharded one those of this rank.
    """
    tensor = local(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        raise FormatError(f"exponents are counted of floating or complex tensors, not of {tensor.dtype}")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.dtype in DIRECT else tensor.to(torch.float32)


def count_(into: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the elements of the n-th tensor, of a format in `DIRECT`, to the n-th row, without waiting for the device."""
    for row, tensor in zip(into.unbind(), tensors, strict=True):
        if tensor.numel():
            merge_(row, _row(tensor))


def _row(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and tensor.dtype is not torch.float64:
        return _row_on_cpu(tensor.reshape(-1).to(torch.float32))
    if tensor.dtype is torch.float64:
        wide = tensor.reshape(-1)
        bits = wide.view(torch.int64) & (2**63 - 1)
    else:
        wide = tensor.reshape(-1).to(torch.float32)
        bits = _as_float64(wide)
    zero = bits == 0
    place = ((bits >> 52) - 1023 - LOWEST).clamp_(0, BINS - 1)
    power = (bits & (2**52 - 1) == 0) & (place > 0) & (place < BINS - 1)
    # what is no finite number goes to the place after the last one, which is cut off
    counted = (bits < TOP) & ~zero
    found = torch.zeros(ROW + 1, dtype=torch.int64, device=tensor.device)
    one = torch.ones((), dtype=torch.int64, device=tensor.device).expand(place.shape)
    found.scatter_add_(0, place.masked_fill(~counted, ROW), one)
    found.scatter_add_(0, (place + POWERS).masked_fill_(~(counted & power), ROW), one)
    nothing = torch.zeros((), dtype=torch.int64, device=tensor.device)
    found[ZEROS] = zero.sum()
    found[INFS] = (bits == TOP).sum()
    found[NANS] = (bits > TOP).sum()
    found[NEGATIVES] = (wide < 0).sum()
    found[LARGEST] = torch.where(counted, bits, nothing).max()
    found[SMALLEST] = torch.where(counted, TOP - bits, nothing).max()
    return found[:ROW]


def _as_float64(wide: Tensor) -> Tensor:
    """Return the bits of the magnitudes of fp32 numbers as float64, by integers: not every device has float64."""
    size = (wide.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    subnormal = size < 0x800000  # a multiple of 2**-149, which as fp32 shows its exponent
    normal = torch.where(subnormal, size.to(torch.float32).view(torch.int32).to(torch.int64), size)
    bias = torch.where(subnormal, (1023 - 127 - 149) << 52, (1023 - 127) << 52)
    bias = torch.where(size >= 0x7F800000, (2047 - 255) << 52, bias)
    return torch.where(size == 0, size, (normal << 29) + bias)


def _row_on_cpu(wide: Tensor) -> Tensor:
    """Return the row of fp32 numbers, where the host may look at them: six times as fast."""
    found = torch.zeros(ROW, dtype=torch.int64, device="cpu")
    size = wide.view(torch.int32) & 0x7FFFFFFF
    fields = torch.bincount(size >> 23, minlength=256)
    powers = torch.bincount(size[size & 0x7FFFFF == 0] >> 23, minlength=256)
    begin = 1 - 127 - LOWEST
    found[begin : begin + 254], found[POWERS + begin : POWERS + begin + 254] = fields[1:-1], powers[1:-1]
    found[ZEROS], found[INFS], found[NANS] = powers[0], powers[255], fields[255] - powers[255]
    found[NEGATIVES] = (wide < 0).sum()
    if fields[0] > powers[0]:  # numbers below the normal ones, as multiples of the smallest
        low = size[(size > 0) & (size < 0x800000)]
        mantissa, exponent = torch.frexp(low.to(torch.float32))
        place = exponent - 1 - 149 - LOWEST
        found[:BINS] += torch.bincount(place, minlength=BINS)
        found[POWERS : POWERS + BINS] += torch.bincount(place[mantissa == 0.5], minlength=BINS)
    finite = size[(size > 0) & (size < 0x7F800000)]
    if finite.numel():
        ends = torch.stack((finite.max(), finite.min())).view(torch.float32).to(torch.float64).view(torch.int64)
        found[LARGEST], found[SMALLEST] = ends[0], TOP - ends[1]
    return found


def merge_(into: Tensor, other: Tensor) -> None:
    """Add the rows of `other` to those of `into`, (..., ROW), in place; waits for nothing."""
    ends = torch.maximum(into[..., LARGEST:], other[..., LARGEST:])
    into.add_(other)
    into[..., LARGEST:] = ends
