"""Precise values and optimizer states of one block, taken from memory and put back: the forms of `kernels.ops`."""

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.kernels.triton.words import bf16_stochastic, finite_or_zero, join, load, nearest, split, store, wide


@triton.jit
def take(
    weight_at,
    beside_at,
    offsets,
    mask,
    FORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the precise value, fp32."""
    low = load(weight_at, offsets, mask, WEIGHT, WHOLE, ALIGNED)
    if FORM == "split":
        value = join(low, load(beside_at, offsets, mask, "int16", WHOLE, ALIGNED))
    elif FORM == "kahan":
        value = wide(low, WEIGHT) + wide(load(beside_at, offsets, mask, WEIGHT, WHOLE, ALIGNED), WEIGHT)
    else:
        value = wide(low, WEIGHT)
    return value


@triton.jit
def put(
    value,
    weight_at,
    beside_at,
    offsets,
    mask,
    bits,
    FORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    BESIDE: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store a new precise value; `bits` are noise, looked at only where it is rounded stochastically."""
    if FORM == "split":
        low, rest = split(value)
        store(weight_at, offsets, mask, low, WEIGHT, WHOLE, ALIGNED)
        store(beside_at, offsets, mask, rest, "int16", WHOLE, ALIGNED)
    elif FORM == "kahan":
        low = nearest(value, WEIGHT)
        rest = nearest(finite_or_zero(value - low), WEIGHT)
        value = low + rest  # the second time settles ties: packing the sum again must give the same two numbers
        low = nearest(value, WEIGHT)
        store(weight_at, offsets, mask, low, WEIGHT, WHOLE, ALIGNED)
        store(beside_at, offsets, mask, finite_or_zero(value - low), WEIGHT, WHOLE, ALIGNED)
    elif FORM == "stochastic":
        store(weight_at, offsets, mask, bf16_stochastic(value, bits), "bf16", WHOLE, ALIGNED)
    else:
        store(weight_at, offsets, mask, value, WEIGHT, WHOLE, ALIGNED)
        if FORM == "copy":
            store(beside_at, offsets, mask, value, BESIDE, WHOLE, ALIGNED)


@triton.jit
def keep(value, state_at, offsets, mask, bits, KIND: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a new optimizer state: fp32 as it is, bf16 rounded stochastically."""
    if KIND == "bf16":
        store(state_at, offsets, mask, bf16_stochastic(value, bits), "bf16", WHOLE, ALIGNED)
    else:
        store(state_at, offsets, mask, value, KIND, WHOLE, ALIGNED)
