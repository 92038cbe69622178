"""`ops.exponents_` in Triton: one launch for all tensors of a format.

A program counts one chunk of a tensor in shared memory (`tl.histogram`) and adds what it has found to the tensor's row
by atomic operations on integers, whose order does not matter: equal tensors give equal rows.

A histogram takes instructions for every 32 places of every number. So whole blocks are counted in a window of 64 places
around the exponents of the first one; a chunk with numbers beyond it is counted again, in all 1024 places.

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

OPTIONS = {**FAITHFUL, "num_warps": THREADS // 32, **({} if torch.version.hip else {"maxnreg": 64})}  # NVIDIA's
"""Histograms of Triton 3.6 would take 80 registers; with 64 up to 40 bytes of a thread are spilled."""

SPECIALS = tl.constexpr(ZEROS)
PLACES = tl.constexpr(1024)
NOWHERE = tl.constexpr(1023)
OUTER, MANY_BINS = tl.constexpr(LOWEST), tl.constexpr(BINS)
"""Places counted: those of a row's counts, the next power of two of them, and the place of what is no element."""

WINDOW, NEAR, BELOW = tl.constexpr(64), tl.constexpr(31), tl.constexpr(27)
"""Places of the window, exponents in it, and how many of these are below that of the first block's largest number. Its
places: numbers that are no powers of two by exponent, zeros, powers of two by exponent, and what is in no other."""

LEAST64, MOST64 = tl.constexpr(1024 + LOWEST), tl.constexpr(1023 + LOWEST + BINS - 1 - 31)
"""The first exponent of a window in fp64, as it is stored: from the second of the bins on, without the last one."""

INF32, INF64 = tl.constexpr(0x7F800000), tl.constexpr(TOP)
"""Bits of infinity."""


@triton.jit
def _bits(address, offsets, mask, KIND: tl.constexpr):
    """Return the patterns of the numbers at `offsets`, those of fp64 in int64, all others as fp32 in int32."""
    words = load(address, offsets, mask, KIND, True)
    number = words if KIND == "fp64" else wide(words, KIND)
    return tl.cast(number, tl.int64 if KIND == "fp64" else tl.int32, bitcast=True)


@triton.jit
def _ends(number, below, size, negatives, largest, smallest, TOP: tl.constexpr):
    """Return the three with the numbers: how many are `below` zero, and their ends; a thread reduces its own first."""
    threads: tl.constexpr = negatives.shape[0]
    each: tl.constexpr = size.shape[0] // threads
    negatives += tl.sum(tl.reshape(below.to(tl.int32), (threads, each)), 1)
    largest = tl.maximum(largest, tl.max(tl.reshape(tl.where(number, size, 0), (threads, each)), 1))
    smallest = tl.maximum(smallest, tl.max(tl.reshape(tl.where(number, TOP - size, 0), (threads, each)), 1))
    return negatives, largest, smallest


@triton.jit
def _near(bits, base, KIND: tl.constexpr, TOP: tl.constexpr):
    """Return the magnitudes of patterns, their exponents less `base`, and whether these are in the window."""
    size = bits & (TOP | (TOP - 1))
    near = (size >> (52 if KIND == "fp64" else 23)).to(tl.int32) - base
    return size, near, (near >= 0) & (near < NEAR)


@triton.jit
def _counted(bits, inside, negatives, largest, smallest, KIND: tl.constexpr, TOP: tl.constexpr):
    """Count the numbers that are `inside` in all places: return their histogram and the three with them."""
    size = bits & (TOP | (TOP - 1))
    if KIND == "fp64":  # outermost bins take what lies beyond them, powers of two and subnormals as well
        place = (size >> 52).to(tl.int32) - (1023 + OUTER)
        power = (place > 0) & (place < MANY_BINS - 1) & ((size & 0xFFFFFFFFFFFFF) == 0)
        place = tl.minimum(tl.maximum(place, 0), MANY_BINS - 1)
    else:
        subnormal = size < 0x800000  # a multiple of the smallest number: as fp32 it shows its exponent
        normal = tl.where(subnormal, tl.cast(size.to(tl.float32), tl.int32, bitcast=True), size)
        place = (normal >> 23) - (127 + OUTER) - tl.where(subnormal, 149, 0)
        power = (normal & 0x7FFFFF) == 0
    place += tl.where(power, MANY_BINS, 0)
    number = inside & (size > 0) & (size < TOP)
    below = inside & (bits < 0) & (size > 0) & (size <= TOP)
    special = SPECIALS + tl.where(size == 0, 0, tl.where(size == TOP, 1, 2))
    counted = tl.where(number, place, tl.where(inside, special, NOWHERE))
    negatives, largest, smallest = _ends(number, below, size, negatives, largest, smallest, TOP)
    return tl.histogram(counted, PLACES), negatives, largest, smallest


@triton.jit
def _bits64(size, KIND: tl.constexpr):
    number = size if KIND == "fp64" else tl.cast(size, tl.float32, bitcast=True).to(tl.float64)
    return tl.cast(number, tl.int64, bitcast=True)


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
    few = tl.zeros((WINDOW,), tl.int32)
    power: tl.constexpr = (1 << (52 if KIND == "fp64" else 23)) - 1
    bias: tl.constexpr = (1023 if KIND == "fp64" else 127) + OUTER  # from a place to an exponent as it is stored
    head = tl.minimum(((-(address + begin * BYTES)) & 15) // BYTES, end - begin)
    whole = (end - begin - head) // BLOCK
    first = _bits(address, begin + lanes, begin + lanes < end, KIND)
    size, top, _ = _near(first, 0, KIND, TOP)
    base = tl.max(tl.where(size < TOP, top, 0), 0) - BELOW
    base = tl.minimum(tl.maximum(base, LEAST64 if KIND == "fp64" else 1), MOST64 if KIND == "fp64" else 255 - NEAR)
    for block in range(0, whole):
        bits = _bits(address, begin + head + block * BLOCK + lanes, None, KIND)
        size, near, known = _near(bits, base, KIND, TOP)
        near += tl.where((size & power) == 0, WINDOW // 2, 0)
        few += tl.histogram(tl.where(known, near, tl.where(size == 0, NEAR, WINDOW - 1)), WINDOW)
        negatives, largest, smallest = _ends(known, known & (bits < 0), size, negatives, largest, smallest, TOP)
    bins = tl.arange(0, WINDOW)
    found = tl.where(bins < WINDOW - 1, few, 0).to(tl.int64)
    if tl.sum(found, 0) == whole * BLOCK:
        row_of = row + base - bias + bins
        powers = (found > 0) & (bins >= WINDOW // 2)
        tl.atomic_add(row_of, found, mask=(found > 0) & (bins < NEAR), sem="relaxed")
        tl.atomic_add(row_of - WINDOW // 2, found, mask=powers, sem="relaxed")
        tl.atomic_add(row_of - WINDOW // 2 + MANY_BINS, found, mask=powers, sem="relaxed")
        tl.atomic_add(row + SPECIALS + bins - NEAR, found, mask=(found > 0) & (bins == NEAR), sem="relaxed")
    else:  # numbers beyond the window, inf, nan
        negatives = tl.zeros((THREADS,), tl.int32)
        for block in range(0, whole):
            bits = _bits(address, begin + head + block * BLOCK + lanes, None, KIND)
            more, negatives, largest, smallest = _counted(bits, lanes >= 0, negatives, largest, smallest, KIND, TOP)
            counts += more
    rest = end - begin - whole * BLOCK  # of the head and after the whole blocks, which may be more than a block
    for start in range(0, rest, BLOCK // 2):
        places = start + tl.arange(0, BLOCK // 2)
        offsets = begin + places + tl.where(places < head, 0, whole * BLOCK)
        bits = _bits(address, offsets, places < rest, KIND)
        more, negatives, largest, smallest = _counted(bits, places < rest, negatives, largest, smallest, KIND, TOP)
        counts += more
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
        places, layout = plan_walk([dense], BLOCK)
        chunks = layout.chunks.here()
        for launch in layout.launches:
            dtype = launch.dtypes[0]
            assert dtype is not None
            double = dtype is torch.float64
            block, top = THREADS * (2 if double else 4), (INF64 if double else INF32).value
            shape = {"CHUNK": layout.chunk, "BLOCK": block, "THREADS": THREADS, "BYTES": dtype.itemsize, "ROW": ROW}
            tables = places, chunks, rows, len(dense), launch.first
            exponents_kernel[(launch.programs,)](*tables, KIND=KINDS[dtype], TOP=top, **shape, **OPTIONS)


assert (NEGATIVES, LARGEST, SMALLEST) == (ZEROS + 3, ZEROS + 4, ZEROS + 5), "the kernel counts places from ZEROS"
