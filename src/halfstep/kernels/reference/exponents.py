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

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.errors import FormatError
from halfstep.formats import POLICY_DTYPES, widest_dtype
from halfstep.kernels.sharded import local

LOWEST, HIGHEST = -192, 191
"""Exponents of the outermost bins: fp32 and what rounds to it at scales from 2**-40 to 2**40 lie inside."""

BINS = HIGHEST - LOWEST + 1
POWERS = BINS
ZEROS, INFS, NANS, NEGATIVES, LARGEST, SMALLEST = range(2 * BINS, 2 * BINS + 6)
ROW = 2 * BINS + 6
TOP = 0x7FF << 52
"""Bits of float64's infinity."""

FIELDS, FIRST = 1 << 11, 1023 + LOWEST
"""Exponents of float64 as they are stored, those of what is not finite with them, and that of the first bin."""

DIRECT = POLICY_DTYPES | {torch.float64}
"""Formats that kernels read as they are."""


def rows(count: int, device: torch.device | str) -> Tensor:
    """Return `count` rows of no elements."""
    return torch.zeros(count, ROW, dtype=torch.int64, device=device)


def parts(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` in a format that kernels read: parts of complex ones, fp8 as fp32; no gradient.

    Of a sparse tensor the elements that are there, of a sharded one those of this rank.
    """
    tensor = local(Tensor.detach(tensor))
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
    wide = tensor.reshape(-1)
    if widest_dtype(wide.device) is torch.float64:
        bits = wide.to(torch.float64).view(torch.int64) & (2**63 - 1)
    else:
        bits = _as_float64(wide.to(torch.float32))
    field = bits >> 52
    one = torch.ones((), dtype=torch.int64, device=wide.device).expand(field.shape)
    fields, powers = torch.zeros(2, FIELDS + 1, dtype=torch.int64, device=wide.device)
    fields.scatter_add_(0, field, one)
    powers.scatter_add_(0, torch.where(bits & (2**52 - 1) == 0, field, FIELDS), one)
    found = rows(1, wide.device)[0]
    found[:BINS] = fields[FIRST : FIRST + BINS]
    found[0] += fields[:FIRST].sum() - powers[0]
    found[BINS - 1] += fields[FIRST + BINS : FIELDS - 1].sum()
    found[POWERS + 1 : POWERS + BINS - 1] = powers[FIRST + 1 : FIRST + BINS - 1]
    found[ZEROS], found[INFS], found[NANS] = powers[0], powers[FIELDS - 1], fields[FIELDS - 1] - powers[FIELDS - 1]
    found[NEGATIVES] = (wide < 0).sum()
    finite = bits < TOP
    found[LARGEST] = torch.where(finite, bits, 0).max()
    found[SMALLEST] = torch.where(finite & (bits > 0), TOP - bits, 0).max()
    return found


def _as_float64(wide: Tensor) -> Tensor:
    """Return the bits of the magnitudes of fp32 numbers as float64, by integers: not every device has float64."""
    size = (wide.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    subnormal = size < 0x800000  # a multiple of 2**-149, which as fp32 shows its exponent
    normal = torch.where(subnormal, size.to(torch.float32).view(torch.int32).to(torch.int64), size)
    bias = torch.where(subnormal, (1023 - 127 - 149) << 52, (1023 - 127) << 52)
    bias = torch.where(size >= 0x7F800000, (2047 - 255) << 52, bias)
    return torch.where(size == 0, size, (normal << 29) + bias)


def merge_(into: Tensor, other: Tensor) -> None:
    """Add the rows of `other` to those of `into`, (..., ROW), in place; waits for nothing."""
    ends = torch.maximum(into[..., LARGEST:], other[..., LARGEST:])
    into.add_(other)
    into[..., LARGEST:] = ends
