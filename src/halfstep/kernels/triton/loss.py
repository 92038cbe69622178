# mypy: ignore-errors
"""Cross entropy of rows of logits in Triton: two launches, and nothing wide is written but two or three sums a row.

One program a row, which it reads in blocks: once for the maximum and the sum of exponentials (kept running, Milakov
and Gimelshein, arXiv:1805.02867), and in the backward pass once for the gradient, rounded as it is written.

Note [odd rows]: with an odd number of classes rows begin at any multiple of 2 bytes, and loads there would be of 2
bytes. So a thread loads the two multiples of 16 bytes in which its eight logits lie, the second from cache, and shifts
them into place (`_eight_each`). A sum thus has the same order, and a loss the same bits, wherever its row begins. Parts
of 16 bytes that reach beyond a row are read whole; they lie in the same page. The gradient has no sums, so its blocks
begin at the first multiple of 16 bytes of the row that is written; what lies before and after is written one by one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.triton.tables import ALIGNMENT, FAITHFUL, KINDS, on
from halfstep.kernels.triton.words import wide

BLOCK = 4096
"""Logits a program works on at a time."""

EACH = 8
"""Logits in 16 bytes: what a thread loads at once."""


@triton.jit
def _eight_each(address, count, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return BLOCK numbers of 16 bits from `address` on, in uint16; what they are beyond `count` is arbitrary.

    `address` is a multiple of 2, and of 16 if `ALIGNED`. With the last of the `count` numbers its 16 bytes are read.
    """
    if ALIGNED:
        lanes = tl.arange(0, BLOCK)
        places = tl.multiple_of(tl.cast(address, tl.pointer_type(tl.uint16)) + lanes, 16)
        found = tl.load(places, mask=lanes // 8 < (count + 7) // 8, other=0)
    else:
        shift = ((address & 15) >> 1).to(tl.int32)  # of the numbers in the first 16 bytes, so many are not wanted
        lanes = tl.arange(0, BLOCK // 2)
        part = lanes // 4
        last = (count + shift + 7) // 8  # parts of 16 bytes that have a number of the row
        places = tl.multiple_of(tl.cast(address & -16, tl.pointer_type(tl.uint32)) + lanes, 16)
        near = tl.load(places, mask=part < last, other=0)
        far = tl.load(tl.multiple_of(places + 4, 16), mask=part + 1 < last, other=0)
        even, odd = tl.split(tl.reshape(near, (BLOCK // 8, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        even, odd = tl.split(tl.reshape(far, (BLOCK // 8, 2, 2)))
        e, g = tl.split(even)
        f, h = tl.split(odd)
        two = (shift & 4) != 0  # by two words
        a, b, c = tl.where(two, c, a), tl.where(two, d, b), tl.where(two, e, c)
        d, e, f = tl.where(two, f, d), tl.where(two, g, e), tl.where(two, h, f)
        one = (shift & 2) != 0
        a, b, c, d, e = (
            tl.where(one, b, a), tl.where(one, c, b), tl.where(one, d, c), tl.where(one, e, d), tl.where(one, f, e),
        )  # fmt: skip
        half = (shift & 1) != 0
        a = tl.where(half, (a >> 16) | (b << 16), a)
        b = tl.where(half, (b >> 16) | (c << 16), b)
        c = tl.where(half, (c >> 16) | (d << 16), c)
        d = tl.where(half, (d >> 16) | (e << 16), d)
        pairs = tl.join(tl.join(a, c), tl.join(b, d))
        found = tl.reshape(tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)), (BLOCK,))
    return found


@triton.jit
def _logits(address, count, KIND: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return BLOCK logits as fp32; what they are beyond `count` is arbitrary."""
    words = _eight_each(address, count, BLOCK, ALIGNED)
    return wide(tl.cast(words, tl.float16, bitcast=True) if KIND == "fp16" else words, KIND)


@triton.jit(do_not_specialize=["stride", "first", "CLASSES"])
def sums_kernel(
    lse,
    own,
    dot,
    logits,
    stride,
    target,
    by_class,  # or None
    first,  # class; with class 0 the sums begin
    CLASSES,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether every row begins at a multiple of 16 bytes
):
    """Add the logits of one row to its sums."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    top = tl.load(lse + index, mask=first > 0, other=-float("inf"))
    if by_class is not None:
        by_class += first
    address = tl.cast(row, tl.int64)
    total = 1.0
    more = 0.0
    for begin in range(0, CLASSES, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        inside = places < CLASSES
        x = tl.where(inside, _logits(address + 2 * begin, CLASSES - begin, KIND, BLOCK, ALIGNED), -float("inf"))
        above = tl.maximum(top, tl.max(x, 0))
        base = tl.where(above == -float("inf"), 0.0, above)  # -inf minus itself would be nan
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = above
        if by_class is not None:
            share = tl.load(by_class + places, mask=inside, other=0.0)
            more += tl.sum(tl.where(inside, share * x, 0.0), 0)
    place = tl.load(target + index) - first
    known = (place >= 0) & (place < CLASSES)
    logit = tl.load(row + place, mask=known, other=0.0).to(tl.float32)
    before = tl.load(own + index, mask=first > 0, other=float("nan"))
    tl.store(lse + index, top + tl.log(total))
    tl.store(own + index, tl.where(known, logit, before))
    if by_class is not None:
        tl.store(dot + index, tl.load(dot + index, mask=first > 0, other=0.0) + more)


@triton.jit
def _gradients(x, places, inside, of_row, share, by_class, KIND: tl.constexpr):
    """Return the gradients of the logits `x`, of classes `places`, fp32 rounded to the format of the logits.

    Without smoothing `share` and `by_class` are None.
    """
    label, lse, taken, factor = of_row
    grad = tl.exp(x - lse) * factor - tl.where(places == label, taken, 0.0)
    if by_class is not None:
        grad -= share * tl.load(by_class + places, mask=inside, other=0.0)
    if KIND == "bf16":  # half to even: Triton's interpreter cuts off where a GPU rounds
        bits = grad.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        grad = tl.where(grad != grad, bits, even).to(tl.float32, bitcast=True)
    return grad


@triton.jit(do_not_specialize=["stride", "into_stride", "first", "CLASSES"])
def gradient_kernel(
    logits,
    stride,
    out,  # may be `logits`
    into_stride,
    lse,
    labels,
    own,
    every,
    scale,
    by_class,  # or None
    first,
    CLASSES,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether every row of both begins at a multiple of 16 bytes
):
    """Write the gradient of one row's logits."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    into = out + index * into_stride
    address = tl.cast(row, tl.int64)
    share = None
    if by_class is not None:
        share = tl.load(scale + index)
        by_class += first
    label = tl.load(labels + index) - first
    of_row = label, tl.load(lse + index), tl.load(own + index), tl.load(every + index)
    head = 0
    if not ALIGNED:
        head = ((-tl.cast(into, tl.int64) & 15) >> 1).to(tl.int32)
        head = tl.minimum(head, CLASSES)
    whole = (CLASSES - head) // 8 * 8
    lanes = tl.arange(0, BLOCK)
    for begin in range(0, whole, BLOCK):
        places = head + begin + lanes
        inside = lanes // 8 < (whole - begin) // 8
        x = _logits(address + 2 * (head + begin), whole - begin, KIND, BLOCK, ALIGNED)
        grad = _gradients(x, places, inside, of_row, share, by_class, KIND)
        tl.store(tl.multiple_of(into + places, 16), grad.to(out.dtype.element_ty), mask=inside)
    lanes = tl.arange(0, 16)  # eight for what lies before the whole parts and eight for what follows
    places = tl.where(lanes < 8, lanes, head + whole - 8 + lanes)
    inside = tl.where(lanes < 8, lanes < head, places < CLASSES)
    x = tl.load(row + places, mask=inside, other=0.0).to(tl.float32)
    grad = _gradients(x, places, inside, of_row, share, by_class, KIND)
    tl.store(into + places, grad.to(out.dtype.element_ty), mask=inside)


def row_sums_(
    lse: Tensor, own: Tensor, dot: Tensor, logits: Tensor, target: Tensor, by_class: Tensor | None, first: int
) -> None:
    """Add logits (N, C), whose classes lie side by side, to `RowSums` in fp32."""
    if len(logits):
        with on(logits.device):
            target, shares = target.contiguous(), None if by_class is None else by_class.contiguous()
            options = _options(logits, aligned=_aligned(logits))
            sums_kernel[(len(logits),)](lse, own, dot, logits, logits.stride(0), target, shares, first, **options)


def gradient(logits: Tensor, *given: Any, out: Tensor) -> None:
    """Write the gradient of logits (N, C) to `out`, which may be `logits`; `given` are lse, `Shares`, and a class."""
    *tensors, first = given
    if len(logits):
        with on(logits.device):
            dense = [None if t is None else t.contiguous() for t in tensors]
            options = _options(logits, aligned=_aligned(logits) and _aligned(out))
            gradient_kernel[(len(logits),)](logits, logits.stride(0), out, out.stride(0), *dense, first, **options)


def _options(logits: Tensor, *, aligned: bool) -> dict[str, Any]:
    """Return the constants of both kernels; a thread has eight logits of a block: with more registers are short."""
    block = max(EACH, min(BLOCK, int(triton.next_power_of_2(logits.shape[1]))))
    shape = {"CLASSES": logits.shape[1], "KIND": KINDS[logits.dtype], "BLOCK": block, "ALIGNED": aligned}
    return {**shape, "num_warps": max(1, block // (32 * EACH)), **FAITHFUL}


def _aligned(rows: Tensor) -> bool:
    return rows.data_ptr() % ALIGNMENT == 0 and (rows.stride(0) % EACH == 0 or len(rows) == 1)
