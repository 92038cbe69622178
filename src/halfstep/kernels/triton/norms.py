"""`ops.norms`, `ops.check_norms` and `ops.advance_` in Triton: four launches for any number of gradients.

The first reads every gradient once and leaves a sum of squares for each chunk, the second adds these up for each
tensor, the third checks the total, the fourth updates the loss scale. No atomics: sums have one order, so the same
gradients give the same bits. Squares are summed in fp32 within a chunk, as torch does, and in fp64 beyond.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.reference.operators import CLIP_EPS
from halfstep.kernels.triton.tables import FAITHFUL, KINDS, on, plan_walk
from halfstep.kernels.triton.words import load, wide

BLOCK = 2048
"""Numbers a program works on at a time: eight for each thread, 16 bytes of bf16."""

MANY = 1024
"""Sums that are added up at a time."""


@triton.jit(do_not_specialize=["count", "first"])
def squares_kernel(
    rows,  # (3, count) int64: addresses, sizes, positions
    chunks,  # (programs, 2) int64
    sums,  # (programs,) fp32, out
    count,
    first,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the squares of one chunk."""
    program = tl.program_id(0) + first
    column = tl.load(chunks + 2 * program)
    begin = tl.load(chunks + 2 * program + 1) * CHUNK
    address = tl.load(rows + column)
    end = tl.minimum(begin + CHUNK, tl.load(rows + count + column))
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    whole = (end - begin) // BLOCK
    for block in range(0, whole):
        offsets = begin + block * BLOCK + lanes
        value = wide(load(address, offsets, None, KIND, ALIGNED), KIND)
        total += value * value
    offsets = begin + whole * BLOCK + lanes
    value = wide(load(address, offsets, offsets < end, KIND, ALIGNED), KIND)
    total += value * value
    tl.store(sums + program, tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"])
def norms_kernel(rows, ends, sums, norms, count, MANY: tl.constexpr):
    """Add up the sums of one tensor."""
    column = tl.program_id(0)
    first = tl.load(ends + column)
    last = tl.load(ends + column + 1)
    total = tl.zeros((MANY,), tl.float64)
    for begin in range(first, last, MANY):
        places = begin + tl.arange(0, MANY)
        total += tl.load(sums + places, mask=places < last, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    tl.store(norms + tl.load(rows + 2 * count + column), norm)


@triton.jit(do_not_specialize=["count"])
def check_kernel(
    norms,
    divisor,  # 0-dim, or None
    norm_out,
    bad_out,
    factor_out,
    count,
    clip_norm,
    clip_eps,
    CLIPS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Check the norms: `reference.operators.check_norms`."""
    total = tl.zeros((MANY,), tl.float64)
    for begin in range(0, count, MANY):
        places = begin + tl.arange(0, MANY)
        each = tl.load(norms + places, mask=places < count, other=0.0).to(tl.float64)
        total += each * each
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    whole = tl.full((), 1.0, tl.float32)
    if divisor is not None:
        whole = tl.load(divisor).to(tl.float32)
        norm = tl.div_rn(norm, whole)
    if CLIPS:
        excess = tl.div_rn(norm + clip_eps, clip_norm)
        whole = whole * tl.where(excess < 1.0, 1.0, excess)
    tl.store(norm_out, norm)
    tl.store(bad_out, (norm - norm) != 0.0)
    tl.store(factor_out, tl.div_rn(1.0, whole))


@triton.jit(do_not_specialize=["interval"])
def advance_kernel(
    scale,
    good,
    total,
    alarm,
    found,
    interval,
    GROWTH: tl.constexpr,  # as arguments they would be fp32
    BACKOFF: tl.constexpr,
    FLOOR: tl.constexpr,
    CEILING: tl.constexpr,
):
    """Update the loss scale after a step: `ops.advance_`."""
    bad = tl.load(found) != 0
    now = tl.load(scale)
    counted = tl.load(good) + 1
    tl.store(alarm, bad & (now <= FLOOR))
    tl.store(total, tl.load(total) + bad.to(tl.int32))
    grows = (counted >= interval) & (bad == 0)
    raised = (now.to(tl.float64) * GROWTH).to(tl.float32)
    raised = tl.where(raised - raised == 0, raised, now)
    lowered = (now.to(tl.float64) * BACKOFF).to(tl.float32)
    moved = tl.where(bad, lowered, tl.where(grows, raised, now))
    tl.store(good, tl.where(bad | grows, 0, counted))
    moved = tl.where(moved < FLOOR, FLOOR, moved)
    tl.store(scale, tl.where(moved > CEILING, CEILING, moved).to(tl.float32))


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor: `reference.norms` for dense tensors of fp32, bf16 or fp16 on one device."""
    device = gradients[0].device
    with on(device):
        rows, layout = plan_walk([gradients], BLOCK)
        count = len(gradients)
        sums = torch.empty(max(layout.programs, 1), dtype=torch.float32, device=device)
        chunks = layout.chunks.here()
        for launch in layout.launches:
            kind = {"KIND": KINDS[launch.dtypes[0]], "ALIGNED": launch.aligned, "CHUNK": layout.chunk, "BLOCK": BLOCK}
            tables = rows, chunks, sums, count, launch.first
            squares_kernel[(launch.programs,)](*tables, **kind, num_warps=BLOCK // 256, **FAITHFUL)
        found = torch.empty(count, dtype=torch.float32, device=device)
        norms_kernel[(count,)](rows, layout.ends.here(), sums, found, count, MANY=MANY, **FAITHFUL)
    return found


def check_norms(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, bad and factor: `reference.operators.check_norms` within an ulp, by one launch."""
    with on(norms.device):
        norm, factor = norms.new_empty(()), norms.new_empty(())
        bad = norms.new_empty((), dtype=torch.bool)
        limit = 1.0 if clip_norm is None else float(clip_norm)
        given = norms, divisor, norm, bad, factor, norms.numel(), limit, CLIP_EPS
        check_kernel[(1,)](*given, CLIPS=clip_norm is not None, MANY=MANY, **FAITHFUL)
    return norm, bad, factor


def advance_(scale: Tensor, good: Tensor, total: Tensor, alarm: Tensor, found: Tensor, *rule: float) -> None:
    """Update the loss scale by one launch; `rule` are the numbers of `ops.advance_`, growth to ceiling."""
    growth, backoff, interval, floor, ceiling = rule
    with on(scale.device):
        numbers = {"GROWTH": growth, "BACKOFF": backoff, "FLOOR": floor, "CEILING": ceiling}
        advance_kernel[(1,)](scale, good, total, alarm, found, interval, **numbers, **FAITHFUL)
