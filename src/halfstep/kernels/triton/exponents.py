"""`ops.exponents_` in Triton: one launch for all tensors of a format.

A program counts one chunk of a tensor in shared memory (`tl.histogram`) and adds what it has found to the tensor's row
by atomic operations on integers, whose order does not matter: equal tensors give equal rows.

Every element is counted in one place: a power of two in that of its power, and when the chunk is done these are added
to the counts of exponents too. Elements before the first multiple of 16 bytes and after the last whole block are
loaded one by one under a mask, all others 8 or 16 bytes a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.reference.exponents import BINS, LARGEST, LOWEST, NEGATIVES, ROW, SMALLEST, TOP, ZEROS
from halfstep.kernels.triton.tables import FAITHFUL, KINDS, on, plan_walk
from halfstep.kernels.triton.words import load, wide

BLOCK = 2048
"""Numbers in the smallest chunk of a program; a multiple of what it works on at a time in every format."""

THREADS = 256

OPTIONS = {**FAITHFUL, "num_warps": THREADS // 32, "maxnreg": 64}
"""Histograms of Triton 3.6 would take 80 registers; with 64 up to 40 bytes of a thread are spilled."""

SPECIALS = tl.constexpr(ZEROS)
PLACES = tl.constexpr(1024)
NOWHERE = tl.constexpr(1023)
OUTER, MANY_BINS = tl.constexpr(LOWEST), tl.constexpr(BINS)
"""Places counted: those of a row's counts, the next power of two of them, and the place of what is no element."""

INF32, INF64 = tl.constexpr(0x7F800000), tl.constexpr(TOP)
"""Bits of infinity."""


@triton.jit
def _places32(bits, inside):
    """Return for fp32 patterns in int32: place, whether finite and not zero, magnitude, and whether below zero."""
    size = bits & 0x7FFFFFFF
    subnormal = size < 0x800000  # a multiple of the smallest number: as fp32 it shows its exponent
    normal = tl.where(subnormal, tl.cast(size.to(tl.float32), tl.int32, bitcast=True), size)
    place = (normal >> 23) - (127 + OUTER) - tl.where(subnormal, 149, 0)
    place += tl.where((normal & 0x7FFFFF) == 0, MANY_BINS, 0)
    number = inside & (size > 0) & (size < INF32)
    special = SPECIALS + tl.where(size == 0, 0, tl.where(size == INF32, 1, 2))
    counted = tl.where(number, place, tl.where(inside, special, NOWHERE))
    return counted, number, size, inside & (bits < 0) & (size > 0) & (size <= INF32)


@triton.jit
def _places64(bits, inside):
    """Return the same for fp64 patterns in int64; outermost bins take what lies beyond them, powers of two as well."""
    size = bits & 0x7FFFFFFFFFFFFFFF
    place = (size >> 52).to(tl.int32) - (1023 + OUTER)  # subnormals go to the first bin with it
    inner = (place > 0) & (place < MANY_BINS - 1)
    place = tl.minimum(tl.maximum(place, 0), MANY_BINS - 1)
    place += tl.where(inner & ((size & 0xFFFFFFFFFFFFF) == 0), MANY_BINS, 0)
    number = inside & (size > 0) & (size < INF64)
    special = SPECIALS + tl.where(size == 0, 0, tl.where(size == INF64, 1, 2))
    counted = tl.where(number, place, tl.where(inside, special, NOWHERE))
    return counted, number, size, inside & (bits < 0) & (size > 0) & (size <= INF64)


@triton.jit
def _counted(
    address,
    offsets,
    inside,
    counts,
    negatives,
    largest,
    smallest,
    KIND: tl.constexpr,
    TOP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Count the numbers at `offsets`: return the four with them. A thread reduces its own numbers first."""
    words = load(address, offsets, inside, KIND, WHOLE, WHOLE)
    if WHOLE:
        inside = tl.full(offsets.shape, True, tl.int1)
    if KIND == "fp64":
        counted, number, size, below = _places64(tl.cast(words, tl.int64, bitcast=True), inside)
    else:
        counted, number, size, below = _places32(tl.cast(wide(words, KIND), tl.int32, bitcast=True), inside)
    threads: tl.constexpr = negatives.shape[0]
    each: tl.constexpr = offsets.shape[0] // threads
    counts += tl.histogram(counted, PLACES)
    negatives += tl.sum(tl.reshape(below.to(tl.int32), (threads, each)), 1)
    largest = tl.maximum(largest, tl.max(tl.reshape(tl.where(number, size, 0), (threads, each)), 1))
    smallest = tl.maximum(smallest, tl.max(tl.reshape(tl.where(number, TOP - size, 0), (threads, each)), 1))
    return counts, negatives, largest, smallest


@triton.jit
def _bits64(size, KIND: tl.constexpr):
    """Return the bits of a magnitude as fp64."""
    if KIND == "fp64":
        found = size
    else:
        found = tl.cast(tl.cast(size, tl.float32, bitcast=True).to(tl.float64), tl.int64, bitcast=True)
    return found


@triton.jit(do_not_specialize=["count", "first"])
def exponents_kernel(
    rows,  # (3, count) int64: addresses, sizes, positions
    chunks,  # (programs, 2) int64
    out,  # (count, ROW) int64, added to
    count,
    first,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,  # numbers at a time
    THREADS: tl.constexpr,
    BYTES: tl.constexpr,  # of a number
    ROW: tl.constexpr,
    TOP: tl.constexpr,  # bits of infinity
):
    """Count the exponents of one chunk."""
    program = tl.program_id(0) + first
    column = tl.load(chunks + 2 * program)
    begin = tl.load(chunks + 2 * program + 1) * CHUNK
    address = tl.load(rows + column)
    end = tl.minimum(begin + CHUNK, tl.load(rows + count + column))
    row = out + tl.load(rows + 2 * count + column) * ROW
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((PLACES,), tl.int32)
    negatives = tl.zeros((THREADS,), tl.int32)
    largest = tl.zeros((THREADS,), tl.int64 if KIND == "fp64" else tl.int32)
    smallest = tl.zeros((THREADS,), tl.int64 if KIND == "fp64" else tl.int32)
    head = tl.minimum(((-(address + begin * BYTES)) & 15) // BYTES, end - begin)
    whole = (end - begin - head) // BLOCK
    for block in range(0, whole):
        offsets = begin + head + block * BLOCK + lanes
        counts, negatives, largest, smallest = _counted(
            address, offsets, offsets < end, counts, negatives, largest, smallest, KIND, TOP, True
        )
    rest = end - begin - whole * BLOCK  # of the head and after the whole blocks, which may be more than a block
    for start in range(0, rest, BLOCK):
        places = start + lanes
        offsets = begin + places + tl.where(places < head, 0, whole * BLOCK)
        counts, negatives, largest, smallest = _counted(
            address, offsets, places < rest, counts, negatives, largest, smallest, KIND, TOP, False
        )
    places = tl.arange(0, PLACES)
    found = counts.to(tl.int64)
    power = (places >= MANY_BINS) & (places < SPECIALS)
    tl.atomic_add(row + places, found, mask=(found > 0) & (places < SPECIALS + 3), sem="relaxed")
    tl.atomic_add(row + places - MANY_BINS, found, mask=(found > 0) & power, sem="relaxed")
    tl.atomic_add(row + SPECIALS + 3, tl.sum(negatives, 0).to(tl.int64), sem="relaxed")
    top = tl.max(largest, 0)
    below = tl.max(smallest, 0)
    if top > 0:  # a number that is finite and not zero
        tl.atomic_max(row + SPECIALS + 4, _bits64(top, KIND), sem="relaxed")
        tl.atomic_max(row + SPECIALS + 5, -_bits64(TOP - below, KIND) + INF64, sem="relaxed")


def exponents_(rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add the elements of the n-th tensor to the n-th row: see `reference.exponents`. One launch a format."""
    if len(rows) != len(tensors) or not rows.is_contiguous():
        raise ValueError(f"{len(tensors)} tensors need as many rows, contiguous; got {tuple(rows.shape)}")
    dense = [t if t.is_contiguous() else t.contiguous() for t in tensors]
    with on(rows.device):
        walk = plan_walk([dense], BLOCK)
        for launch in walk.launches:
            dtype = launch.dtypes[0]
            assert dtype is not None
            double = dtype is torch.float64
            exponents_kernel[(launch.programs,)](
                walk.rows,
                walk.chunks,
                rows,
                len(dense),
                launch.first,
                KIND=KINDS[dtype],
                CHUNK=walk.chunk,
                BLOCK=THREADS * (2 if double else 4),
                THREADS=THREADS,
                BYTES=dtype.itemsize,
                ROW=ROW,
                TOP=(INF64 if double else INF32).value,
                **OPTIONS,
            )


assert (NEGATIVES, LARGEST, SMALLEST) == (ZEROS + 3, ZEROS + 4, ZEROS + 5), "the kernel counts places from ZEROS"
