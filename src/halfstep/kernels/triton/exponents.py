"""`ops.exponents_` in Triton: one launch for all tensors of a format.

A program counts one chunk of a tensor in shared memory (`tl.histogram`) and adds what it has found to the tensor's row
by atomic operations on integers, whose order does not matter: equal tensors give equal rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.reference.exponents import BINS, LARGEST, LOWEST, NEGATIVES, ROW, SMALLEST, TOP, ZEROS
from halfstep.kernels.triton.tables import KINDS, on, plan_walk
from halfstep.kernels.triton.words import load, wide

__all__ = ["exponents_"]

BLOCK = 2048
"""Numbers a program works on at a time."""

SPECIALS = tl.constexpr(ZEROS)
PLACES = tl.constexpr(1024)
NOWHERE = tl.constexpr(1023)
OUTER, MANY_BINS = tl.constexpr(LOWEST), tl.constexpr(BINS)
"""Places counted: those of a row's counts, the next power of two of them, and the place of what is no element."""


@triton.jit
def _binary_log(size):
    """Return floor(log2(size)) of an int32 from 1 to 2**24, which fp32 holds exactly."""
    return (tl.cast(size.to(tl.float32), tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def exponents_kernel(
    rows,  # (3, count) int64: addresses, sizes, positions
    chunks,  # (programs, 2) int64
    out,  # (count, ROW) int64, added to
    count,
    first,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    TOP: tl.constexpr,
):
    """Count the exponents of one chunk."""
    program = tl.program_id(0) + first
    column = tl.load(chunks + 2 * program)
    begin = tl.load(chunks + 2 * program + 1) * CHUNK
    address = tl.load(rows + column)
    end = tl.minimum(begin + CHUNK, tl.load(rows + count + column))
    row = out + tl.load(rows + 2 * count + column) * ROW
    counts = tl.zeros((PLACES,), tl.int32)
    negatives = tl.zeros((BLOCK,), tl.int32)
    largest = tl.zeros((BLOCK,), tl.int64)
    smallest = tl.zeros((BLOCK,), tl.int64)
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < end
        words = load(address, offsets, inside, KIND, False, ALIGNED)
        if KIND == "fp64":
            bits = tl.cast(words, tl.int64, bitcast=True)
            below = bits < 0
            size = bits & 0x7FFFFFFFFFFFFFFF
            power = (size & 0xFFFFFFFFFFFFF) == 0
            exponent = (size >> 52).to(tl.int32) - 1023  # subnormals go to the first bin with it
        else:
            bits = tl.cast(wide(words, KIND), tl.int32, bitcast=True)
            below = bits < 0
            low = bits & 0x7FFFFFFF
            subnormal = low < 0x800000
            fraction = low & 0x7FFFFF
            level = _binary_log(tl.where(subnormal & (low > 0), low, 1))
            exponent = tl.where(subnormal, level - 149, (low >> 23) - 127)
            power = tl.where(subnormal, (low & (low - 1)) == 0, fraction == 0)
            # as float64: 896 is the difference of the biases; the leading one of a subnormal number moves out
            moved = (low.to(tl.int64) << 29) + (896 << 52)
            moved += tl.where(low >= 0x7F800000, 896 << 52, 0).to(tl.int64)
            lifted = (low.to(tl.int64) << (52 - level)) + ((level + 873).to(tl.int64) << 52)
            size = tl.where(low == 0, 0, tl.where(subnormal, lifted, moved))
        place = tl.minimum(tl.maximum(exponent - OUTER, 0), MANY_BINS - 1)
        number = inside & (size > 0) & (size < TOP)
        special = SPECIALS + tl.where(size == 0, 0, tl.where(size == TOP, 1, 2))
        counted = tl.where(number, place, tl.where(inside, special, NOWHERE))
        counts += tl.histogram(counted, PLACES)
        inner = (place > 0) & (place < MANY_BINS - 1)
        powers = number & power & inner
        if tl.sum(powers.to(tl.int32), 0) > 0:  # seldom in wide formats
            counts += tl.histogram(tl.where(powers, place + MANY_BINS, NOWHERE), PLACES)
        negatives += (inside & below & (size > 0) & (size <= TOP)).to(tl.int32)
        largest = tl.maximum(largest, tl.where(number, size, 0))
        smallest = tl.maximum(smallest, tl.where(number, TOP - size, 0))
    places = tl.arange(0, PLACES)
    found = counts.to(tl.int64)
    tl.atomic_add(row + places, found, mask=(found > 0) & (places < SPECIALS + 3), sem="relaxed")
    tl.atomic_add(row + SPECIALS + 3, tl.sum(negatives.to(tl.int64), 0), sem="relaxed")
    tl.atomic_max(row + SPECIALS + 4, tl.max(largest, 0), sem="relaxed")
    tl.atomic_max(row + SPECIALS + 5, tl.max(smallest, 0), sem="relaxed")


def exponents_(rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the elements of the n-th tensor to the n-th row: see `reference.exponents`. One launch a format."""
    if len(rows) != len(tensors) or not rows.is_contiguous():
        raise ValueError(f"{len(tensors)} tensors need as many rows, contiguous; got {tuple(rows.shape)}")
    dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]
    with on(rows.device):
        walk = plan_walk([dense], BLOCK)
        for launch in walk.launches:
            exponents_kernel[(launch.programs,)](
                walk.rows,
                walk.chunks,
                rows,
                len(dense),
                launch.first,
                KIND=KINDS[launch.dtypes[0]],
                ALIGNED=launch.aligned,
                CHUNK=walk.chunk,
                BLOCK=BLOCK,
                ROW=ROW,
                TOP=TOP,
                num_warps=BLOCK // 256,
            )


assert (NEGATIVES, LARGEST, SMALLEST) == (ZEROS + 3, ZEROS + 4, ZEROS + 5), "the kernel counts places from ZEROS"
