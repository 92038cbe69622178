"""The operators of `ops.UPDATES` in Triton: one launch for all parameters whose formats agree.

The arithmetic is that of the specs' references, operation by operation, with IEEE division and root and without
contraction, so results are the same bits. An optimizer with counters takes one more launch, which counts the steps and
computes the bias corrections: powers in fp64 by squaring, where the last bit may differ from the host's; after rounding
to fp32 it shows in about one correction of a million. When `bad`, programs end before they write anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.optimizers import COUNTERS, STATES, OptimizerSpec
from halfstep.kernels.triton.tables import FAITHFUL, KINDS, on, plan_walk
from halfstep.kernels.triton.words import keep, key, load, mix, noise, put, take, wide

Tensors: TypeAlias = Sequence[Tensor]
Options: TypeAlias = Mapping[str, Any]

NUMBERS: Mapping[str, Callable[[Options], tuple[float, ...]]] = {
    "adam": lambda given: (1 - given["beta1"], given["beta2"], 1 - given["beta2"], given["eps"]),
    "nadam": lambda given: (1 - given["beta1"], given["beta2"], 1 - given["beta2"], given["eps"]),
    "sgd": lambda given: (given["momentum"],),
    "lion": lambda given: (1 - given["beta1"], 1 - given["beta2"]),
}
"""Name of a spec -> what `update_block` calls a, b, c and d; rounded to fp32."""

BLOCK = 1024
"""Numbers a program works on at a time: four for each thread, 16 bytes of fp32, so that all formats have one layout."""

UPDATE = {**FAITHFUL, "num_warps": BLOCK // 128}

FEW = 128
"""Step counters a program advances."""

BITS = 31
"""Binary digits of a step count; fp32 counters stop at 2**24."""

WEIGHT_AT, BESIDE_AT, FIRST_AT, SECOND_AT, STEP_AT, PRODUCT_AT, GRADIENT_AT, SIZE_AT, NAME_AT = map(
    tl.constexpr, range(9)
)
"""Rows of the table (`tables.plan_walk`)."""


@triton.jit
def wide_number(bits):
    """Return the fp64 number whose pattern `bits` is: arguments of a kernel are fp32 where they are floats."""
    return tl.cast(bits.to(tl.int64), tl.float64, bitcast=True)


@triton.jit
def power(base, exponents, BITS: tl.constexpr):
    """Return fp64 `base` to the power of each of `exponents`, int32, by squaring."""
    found = tl.full(exponents.shape, 1.0, tl.float64)
    for digit in tl.static_range(BITS):
        found = tl.where(((exponents >> digit) & 1) == 1, found * base, found)
        base = base * base
    return found


@triton.jit
def learning_rate(rate, lr):
    """Return the learning rate, fp64: `rate`, a tensor, if there is one, else that of the pattern `lr`."""
    return wide_number(lr) if rate is None else tl.load(rate).to(tl.float64)


@triton.jit(do_not_specialize=["count", "lr", "beta1", "beta2", "cooling"])
def count_kernel(
    rows,
    corrections,  # (count, 3) fp32, out: factor of the mean, what its divisor is divided by, factor of the gradient
    bad,
    rate,
    count,
    lr: tl.int64,  # patterns of fp64 numbers; by its value that of 0.0 would be an int32
    beta1: tl.int64,
    beta2: tl.int64,
    cooling: tl.int64,  # of NAdam's momentum, after one step
    METHOD: tl.constexpr,
    FEW: tl.constexpr,
    BITS: tl.constexpr,
):
    """Advance the step counters of some parameters, and compute their bias corrections, unless `bad`."""
    if tl.load(bad):
        return
    columns = tl.program_id(0) * FEW + tl.arange(0, FEW)
    mask = columns < count
    steps_at = tl.cast(tl.load(rows + STEP_AT * count + columns, mask=mask, other=0), tl.pointer_type(tl.float32))
    steps = tl.load(steps_at, mask=mask, other=0.0) + 1.0
    tl.store(steps_at, steps, mask=mask)
    done = steps.to(tl.int32)
    power2 = power(wide_number(beta2), done, BITS)
    if METHOD == "nadam":
        coolness = power(wide_number(cooling), done, BITS)
        momentum = wide_number(beta1) * (1.0 - 0.5 * coolness)
        following = wide_number(beta1) * (1.0 - 0.5 * (coolness * wide_number(cooling)))
        at = tl.cast(tl.load(rows + PRODUCT_AT * count + columns, mask=mask, other=0), tl.pointer_type(tl.float32))
        product = tl.load(at, mask=mask, other=0.0) * momentum.to(tl.float32)
        tl.store(at, product, mask=mask)
        passed = product.to(tl.float64)
        size = learning_rate(rate, lr) * following / (1.0 - passed * following)
        slope = learning_rate(rate, lr) * (1.0 - momentum) / (1.0 - passed)
        tl.store(corrections + 3 * columns + 1, (1.0 - power2).to(tl.float32), mask=mask)
        tl.store(corrections + 3 * columns + 2, slope.to(tl.float32), mask=mask)
    else:
        size = learning_rate(rate, lr) / (1.0 - power(wide_number(beta1), done, BITS))
        tl.store(corrections + 3 * columns + 1, tl.sqrt(1.0 - power2).to(tl.float32), mask=mask)
    tl.store(corrections + 3 * columns, size.to(tl.float32), mask=mask)


@triton.jit
def update_block(
    at, offsets, mask, name, step_key, numbers, RULE: tl.constexpr, KINDS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Update the numbers at `offsets` of one parameter, as the spec's reference, line by line."""
    weight_at, beside_at, first_at, second_at, gradient_at = at
    factor, size, root, slope, decay, weight_decay, a, b, c, d = numbers
    METHOD, VARIANT, DECAYS, MAXIMIZE = RULE
    FORM, WEIGHT, BESIDE, FIRST, SECOND, GRADIENT = KINDS
    STORED: tl.constexpr = (FORM, WEIGHT, BESIDE)
    mixed = mix(offsets.to(tl.uint32))
    first_bits = noise(step_key, name, 1, mixed)
    gradient = wide(load(gradient_at, offsets, mask, GRADIENT, ALIGNED), GRADIENT) * factor
    value = take(weight_at, beside_at, offsets, mask, STORED, ALIGNED)
    if MAXIMIZE:
        gradient = -gradient
    if METHOD == "lion":
        average = wide(load(first_at, offsets, mask, FIRST, ALIGNED), FIRST)
        direction = average + (gradient - average) * a
        direction = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, 0.0))
        value = value * decay
        value = value - direction * size
        average = average + (gradient - average) * b
        keep(average, first_at, offsets, mask, first_bits, FIRST, ALIGNED)
    elif METHOD == "sgd":
        if DECAYS:
            gradient = gradient + value * weight_decay
        if FIRST != "none":
            average = wide(load(first_at, offsets, mask, FIRST, ALIGNED), FIRST)
            average = average * a + gradient
            keep(average, first_at, offsets, mask, first_bits, FIRST, ALIGNED)
            if VARIANT:  # nesterov
                gradient = gradient + average * a
            else:
                gradient = average
        value = value - gradient * size
    else:
        if VARIANT:  # decoupled
            value = value * decay
        elif DECAYS:
            gradient = gradient + value * weight_decay
        mean = wide(load(first_at, offsets, mask, FIRST, ALIGNED), FIRST)
        mean = mean + (gradient - mean) * a
        square = wide(load(second_at, offsets, mask, SECOND, ALIGNED), SECOND) * b
        square = square + gradient * gradient * c
        if METHOD == "nadam":
            below = tl.sqrt_rn(tl.div_rn(square, root)) + d
            value = value - slope * tl.div_rn(gradient, below)
            value = value - size * tl.div_rn(mean, below)
        else:
            value = value - size * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root) + d)
        keep(mean, first_at, offsets, mask, first_bits, FIRST, ALIGNED)
        keep(square, second_at, offsets, mask, noise(step_key, name, 2, mixed), SECOND, ALIGNED)
    put(value, weight_at, beside_at, offsets, mask, noise(step_key, name, 0, mixed), STORED, ALIGNED)


@triton.jit(do_not_specialize=["count", "first", "lr", "wide_decay"])
def update_kernel(
    rows,  # (9, count) int64
    chunks,  # (programs, 2) int64
    corrections,  # of an optimizer with counters, or None
    factor,
    bad,
    draws,  # or None
    rate,  # or None
    count,
    first,
    lr: tl.int64,  # pattern of an fp64 number
    wide_decay: tl.int64,  # likewise
    weight_decay,
    a,
    b,
    c,
    d,
    METHOD: tl.constexpr,
    FORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    BESIDE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    GRADIENT: tl.constexpr,
    VARIANT: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of a parameter, unless `bad`."""
    if tl.load(bad):
        return
    program = tl.program_id(0) + first
    column = tl.load(chunks + 2 * program)
    begin = tl.load(chunks + 2 * program + 1) * CHUNK
    rows += column
    at = (
        tl.load(rows + WEIGHT_AT * count),
        tl.load(rows + BESIDE_AT * count),
        tl.load(rows + FIRST_AT * count),
        tl.load(rows + SECOND_AT * count),
        tl.load(rows + GRADIENT_AT * count),
    )
    end = tl.minimum(begin + CHUNK, tl.load(rows + SIZE_AT * count))
    name = tl.load(rows + NAME_AT * count)
    wide_rate = learning_rate(rate, lr)
    decay = (1.0 - wide_rate * wide_number(wide_decay)).to(tl.float32)
    size = wide_rate.to(tl.float32)
    root = size
    slope = size
    if corrections is not None:
        size = tl.load(corrections + 3 * column)
        root = tl.load(corrections + 3 * column + 1)
        if METHOD == "nadam":
            slope = tl.load(corrections + 3 * column + 2)
    step_key = tl.full((), 0, tl.uint32)  # not used where nothing is rounded stochastically
    if FORM == "stochastic" or FIRST == "bf16" or SECOND == "bf16":
        step_key = key(draws)
    numbers = tl.load(factor), size, root, slope, decay, weight_decay, a, b, c, d
    RULE: tl.constexpr = (METHOD, VARIANT, DECAYS, MAXIMIZE)
    KINDS: tl.constexpr = (FORM, WEIGHT, BESIDE, FIRST, SECOND, GRADIENT)
    lanes = tl.arange(0, BLOCK)
    whole = (end - begin) // BLOCK
    for block in range(0, whole):
        update_block(at, begin + block * BLOCK + lanes, None, name, step_key, numbers, RULE, KINDS, ALIGNED)
    if begin + whole * BLOCK < end:
        offsets = begin + whole * BLOCK + lanes
        update_block(at, offsets, offsets < end, name, step_key, numbers, RULE, KINDS, ALIGNED)


def update(spec: OptimizerSpec, weights: Tensors, beside: Tensors, *given: Any) -> None:
    """Carry out the update operator of a spec; `given` are its arguments from the first state on."""
    states, counters = given[: len(spec.states)], given[len(spec.states) : len(spec.states) + len(spec.counters)]
    gradients, factor, bad, draws, start, form, rate, lr, *values = given[len(states) + len(counters) :]
    device, count, options = gradients[0].device, len(gradients), dict(zip(spec.options, values, strict=True))
    states, counters = (*states, *[()] * (STATES - len(states))), (*counters, *[()] * (COUNTERS - len(counters)))
    with on(device):
        rows, layout = plan_walk((weights, beside, *states, *counters, gradients), BLOCK, start)
        corrections = None
        if spec.counters:
            corrections = torch.empty(count, 3, dtype=torch.float32, device=device)
            cooling = 0.96 ** options.get("momentum_decay", 0.0)
            bits = [_bits(one) for one in (lr, options["beta1"], options["beta2"], cooling)]
            constants = {"METHOD": spec.name, "FEW": FEW, "BITS": BITS, **FAITHFUL}
            count_kernel[(-(-count // FEW),)](rows, corrections, bad, rate, count, *bits, **constants)
        weight_decay, numbers = options["weight_decay"], NUMBERS[spec.name](options)
        tensors = rows, layout.chunks.here(), corrections, factor, bad, draws, rate
        scalars = _bits(lr), _bits(weight_decay), float(weight_decay), *map(float, (*numbers, 0.0, 0.0, 0.0)[:4])
        variant, maximize = bool(options.get("decoupled") or options.get("nesterov")), bool(options["maximize"])
        rule = {"METHOD": spec.name, "VARIANT": variant, "DECAYS": bool(weight_decay), "MAXIMIZE": maximize}
        for launch in layout.launches:
            weight, low, first, second, _, _, gradient = (KINDS[dtype] for dtype in launch.dtypes)
            kinds = {"WEIGHT": weight, "BESIDE": low, "FIRST": first, "SECOND": second, "GRADIENT": gradient}
            stored = form if form != "copy" or low != "none" else "plain"
            shape = {"FORM": stored, "ALIGNED": launch.aligned, "CHUNK": layout.chunk, "BLOCK": BLOCK}
            given = *tensors, count, launch.first, *scalars
            update_kernel[(launch.programs,)](*given, **rule, **kinds, **shape, **UPDATE)


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
