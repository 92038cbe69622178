"""Device functions shared by the Triton kernels: loads and stores, roundings, noise, forms of values and states.

bf16 is loaded and stored as the integers it consists of, and rounded by integer arithmetic: that is the same
everywhere, Triton's interpreter included, whose own conversion truncates.

Note [whole blocks]: a thread loads 16 bytes at once only where the compiler knows that the address is a multiple of 16
and that no lane is masked. Both come from tables here, so kernels work on all whole blocks of a tensor without a mask
(`mask` is None), with the alignment promised if the host has checked it (`ALIGNED`), and on what is left with one.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from halfstep.kernels.triton.tables import FAITHFUL, on


@triton.jit
def pointers(address, offsets, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to numbers of `KIND` (fp64, fp32, fp16, bf16, int16) at `offsets` from `address`, int64."""
    if KIND == "fp64":
        base = tl.cast(address, tl.pointer_type(tl.float64))
    elif KIND == "fp32":
        base = tl.cast(address, tl.pointer_type(tl.float32))
    elif KIND == "fp16":
        base = tl.cast(address, tl.pointer_type(tl.float16))
    else:
        base = tl.cast(address, tl.pointer_type(tl.uint16))
    places = base + offsets
    if mask is None and ALIGNED:
        places = tl.multiple_of(places, 16)
    return places


@triton.jit
def load(address, offsets, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return what is stored at `offsets` from `address`; bf16 and int16 as uint16."""
    return tl.load(pointers(address, offsets, mask, KIND, ALIGNED), mask=mask, other=None if mask is None else 0)


@triton.jit
def store(address, offsets, mask, value, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Store `value`, fp32 rounded half to even, or uint16 as it is."""
    if KIND == "bf16":
        value = bf16_nearest(value)
    elif KIND == "fp16":
        value = value.to(tl.float16)
    tl.store(pointers(address, offsets, mask, KIND, ALIGNED), value, mask=mask)


@triton.jit
def wide(words, KIND: tl.constexpr):
    """Return what `load` has loaded as fp32."""
    return tl.cast(words.to(tl.uint32) << 16, tl.float32, bitcast=True) if KIND == "bf16" else words.to(tl.float32)


# ------------------------------------------------------------------ roundings


@triton.jit
def bf16_nearest(value):
    """Round to bf16, half to even; bits in uint16. A number that is bf16 already is passed on if it is uint16."""
    if value.dtype == tl.uint16:
        found = value
    else:
        bits = tl.cast(value, tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        found = tl.where(nan, 0x7FC0, rounded).to(tl.uint16)
    return found


@triton.jit
def bf16_stochastic(value, noise):
    """Round to bf16, up where the 16 bits cut off plus `noise` carry; what is not finite stays. Bits in uint16."""
    bits = tl.cast(value, tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    cut = ((bits + noise) >> 16).to(tl.uint16)
    return tl.where(finite, cut, bf16_nearest(value))


@triton.jit
def nearest(value, KIND: tl.constexpr):
    """Return fp32 `value` rounded half to even to `KIND`, as fp32."""
    return wide(bf16_nearest(value), KIND) if KIND == "bf16" else value.to(tl.float16).to(tl.float32)


@triton.jit
def join(low, rest):
    """Return the fp32 number of a bf16 number and its remainder, both uint16: `reference.operators.join_bf16`."""
    lower = rest.to(tl.uint32)
    nan = (low & 0x7FFF) > 0x7F80
    up = tl.where(nan, 0, lower >> 15)
    return tl.cast(((low.to(tl.uint32) - up) << 16) | lower, tl.float32, bitcast=True)


@triton.jit
def split(value):
    """Return bf16, rounded half up, and remainder, both uint16: `reference.operators.split_bf16`."""
    bits = tl.cast(value, tl.uint32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    low = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    return low.to(tl.uint16), (bits & 0xFFFF).to(tl.uint16)


@triton.jit
def finite_or_zero(value):
    """Return `value` with 0 in place of inf and NaN."""
    bits = tl.cast(value, tl.uint32, bitcast=True)
    return tl.where((bits & 0x7F800000) != 0x7F800000, value, 0.0)


# ------------------------------------------------------------------ noise


@triton.jit
def mix(word):
    """Scramble uint32 words: `reference.operators.mix`."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def key(draws):
    """Return what seed and count make of the noise of one step: uint32."""
    seed = tl.load(draws)
    count = tl.load(draws + 1)
    found = mix(seed.to(tl.uint32))
    found = mix(found ^ (seed >> 32).to(tl.uint32))
    return mix(found ^ count.to(tl.uint32))


@triton.jit
def noise(step_key, name, stream: tl.constexpr, mixed):
    """Return 16 random bits a number, in uint32: `reference.operators.noise`; `mixed` are the scrambled positions."""
    return mix(mix(step_key ^ (4 * name + stream).to(tl.uint32)) ^ mixed) >> 16


# ------------------------------------------------------------------ forms of values and states: `kernels.ops`


@triton.jit
def take(weight_at, beside_at, offsets, mask, STORED: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the fp32 value; `STORED` are the form and the kinds of weight and `beside`."""
    FORM, WEIGHT, _ = STORED
    low = load(weight_at, offsets, mask, WEIGHT, ALIGNED)
    if FORM == "split":
        value = join(low, load(beside_at, offsets, mask, "int16", ALIGNED))
    elif FORM == "kahan":
        value = wide(low, WEIGHT) + wide(load(beside_at, offsets, mask, WEIGHT, ALIGNED), WEIGHT)
    else:
        value = wide(low, WEIGHT)
    return value


@triton.jit
def put(value, weight_at, beside_at, offsets, mask, bits, STORED: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a new fp32 value; `bits` are noise, read only where it is rounded stochastically."""
    FORM, WEIGHT, BESIDE = STORED
    if FORM == "split":
        low, rest = split(value)
        store(weight_at, offsets, mask, low, WEIGHT, ALIGNED)
        store(beside_at, offsets, mask, rest, "int16", ALIGNED)
    elif FORM == "kahan":
        low = nearest(value, WEIGHT)
        rest = nearest(finite_or_zero(value - low), WEIGHT)
        value = low + rest  # the second time settles ties: packing the sum again must give the same two numbers
        low = nearest(value, WEIGHT)
        store(weight_at, offsets, mask, low, WEIGHT, ALIGNED)
        store(beside_at, offsets, mask, finite_or_zero(value - low), WEIGHT, ALIGNED)
    elif FORM == "stochastic":
        store(weight_at, offsets, mask, bf16_stochastic(value, bits), "bf16", ALIGNED)
    else:
        store(weight_at, offsets, mask, value, WEIGHT, ALIGNED)
        if FORM == "copy":
            store(beside_at, offsets, mask, value, BESIDE, ALIGNED)


@triton.jit
def keep(value, state_at, offsets, mask, bits, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a new optimizer state: fp32 as it is, bf16 rounded stochastically."""
    words = bf16_stochastic(value, bits) if KIND == "bf16" else value
    store(state_at, offsets, mask, words, KIND, ALIGNED)


# ------------------------------------------------------------------ whether Triton works on a device


@triton.jit
def probe_kernel(number):
    """Do nothing: what a CUDA graph would replay has no memory to write to."""


def launch(device: torch.device) -> None:
    """Compile and launch `probe_kernel`, or raise what Triton raises; do nothing while a CUDA graph is captured.

    Triton compiles C code when it is first used, and some versions (3.6) again for every combination of argument types:
    without a C compiler it would raise in the middle of a step. The probe is compiled in an empty cache, since a cache
    that another machine has filled in part would hide that.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    driver.active.get_current_target()  # the driver's own C code may come from the user's cache
    with TemporaryDirectory() as folder, triton.knobs.cache.scope(), on(device):
        triton.knobs.cache.dir = folder
        probe_kernel[(1,)](2, **FAITHFUL)
