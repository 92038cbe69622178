"""Reference of the operators of `kernels.ops`: what norms, check, updates and roundings compute, in plain PyTorch.

Every product, sum and root is one fp32 operation, rounded once, in the order written. The compiled kernels do the same,
so results agree bit for bit where the device's division and square root are IEEE's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, so equal settings clip equally
HALF_ULP = 0x8000  # half of the lowest bit that bf16 keeps of an fp32 pattern
QUIET = 0x400000  # the quiet bit of a NaN, in an fp32 pattern
WORD = 0xFFFFFFFF
WEIGHT, FIRST, SECOND = range(3)
"""Streams of noise."""


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of every tensor, dense or sparse, accumulated in fp32: (n,) on the device of the first."""
    if not tensors:
        return torch.zeros(0, device="cpu")
    device = tensors[0].device
    each = []
    for tensor in tensors:
        dense = tensor.coalesce().values() if tensor.is_sparse else tensor.detach()
        values = torch.view_as_real(dense) if dense.is_complex() else dense
        values = values if values.dtype is torch.float64 else values.float()
        each.append(torch.linalg.vector_norm(values).float().to(device))
    return torch.stack(each)


def check_norms(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total norm of the unscaled gradients, whether it is not finite, and the factor of the update, 0-dim.

    The factor is ``1 / (divisor * max(1, (norm + 1e-6) / clip_norm))``; `divisor` is 0-dim fp32, or None for 1.
    """
    norm: Tensor = torch.linalg.vector_norm(norms)
    one = torch.ones_like(norm)
    if divisor is not None:
        norm = norm / divisor
    bad = (norm - norm) != 0  # inf - inf is nan, and nan != 0
    whole = one if divisor is None else divisor.to(norm)
    if clip_norm is not None:
        whole = whole * ((norm + CLIP_EPS) / clip_norm).clamp(min=1.0)
    return norm, bad, one / whole


def split_bf16(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into bf16 and a 16-bit remainder that together are the fp32 bits.

    Rounds half up on the bit pattern, ``low = (bits + 0x8000) >> 16``: with round-half-even one even bf16 would stand
    for 65,537 fp32 values, one more than a remainder (int16) has. NaN keeps its upper half, made quiet.
    """
    bits = wide.detach().view(torch.int32)
    upper = torch.where(torch.isnan(wide), bits | QUIET, bits + HALF_ULP) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_bf16(low: Tensor, remainder: Tensor) -> Tensor:
    """Rebuild fp32 from `split_bf16`'s halves, bit for bit except for the payload of signalling NaNs."""
    upper, lower = low.view(torch.int16).to(torch.int32) << 16, remainder.to(torch.int32)
    # where the upper half was rounded up, the remainder is below 0 and takes that back
    return torch.where(torch.isnan(low), upper | (lower & 0xFFFF), upper + lower).view(torch.float32)


def split_kahan(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest number of a low format and, in the same format, what rounding took from it."""
    for _ in range(2):  # the second time settles ties: packing the sum again must give the same two numbers
        low = value.to(dtype)
        rest = (value - low.float()).nan_to_num_(0.0, 0.0, 0.0).to(dtype)  # not finite only where `low` is not
        value = low.float() + rest.float()
    return low, rest


def mix(word: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64: the constants of Chris Wellons' "lowbias32" (public domain, 2018)."""
    word = word & WORD
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return word ^ (word >> 16)


def noise(draws: Tensor, tensor: int, stream: int, count: int) -> Tensor:
    """Return 16 random bits for each of the `count` elements of a parameter, in memory's order: int64 below 65536."""
    seed, steps = draws[0], draws[1]
    key = mix(seed)
    for part in (seed >> 32, steps, steps.new_tensor(4 * tensor + stream)):
        key = mix(key ^ (part & WORD))
    return mix(key ^ mix(torch.arange(count, device=draws.device))) >> 16


def stochastic_bf16(wide: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16, up where the 16 bits cut off plus `bits` carry; what is not finite stays."""
    pattern = wide.view(torch.int32).to(torch.int64) + bits.reshape(wide.shape)
    cut = (pattern & ~0xFFFF).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(wide), cut, wide).to(torch.bfloat16)


def _take(form: str, weight: Tensor, beside: Tensor | None) -> Tensor:
    """Return the fp32 value as a new tensor."""
    if form in {"split", "kahan"}:
        assert beside is not None
        return join_bf16(weight, beside) if form == "split" else weight.float() + beside.float()
    return weight.to(torch.float32, copy=True)


def _put(form: str, value: Tensor, weight: Tensor, beside: Tensor | None, bits: Tensor | None) -> None:
    if form in {"split", "kahan"}:
        assert beside is not None
        low, rest = split_bf16(value) if form == "split" else split_kahan(value, weight.dtype)
        weight.copy_(low), beside.copy_(rest)
    elif form == "stochastic":
        assert bits is not None
        weight.copy_(stochastic_bf16(value, bits))
    else:
        weight.copy_(value)
        if beside is not None:
            beside.copy_(value)


def _store(state: Tensor, value: Tensor, bits: Tensor | None) -> None:
    """Write a new optimizer state: fp32 as it is, bf16 rounded stochastically."""
    if state.dtype is torch.float32:
        state.copy_(value)
    else:
        assert bits is not None
        state.copy_(stochastic_bf16(value, bits))


def single(number: float) -> Tensor:
    """Return `number` rounded to fp32: 0-dim, on the CPU."""
    return torch.tensor(number, dtype=torch.float32, device="cpu")


def root(square: Tensor) -> Tensor:
    """Return the square root rounded once: torch's own on CPU (2.13) misses the last bit for one number in five."""
    return square.double().sqrt().float()


def update(
    rule: Callable[..., tuple[Tensor, ...]],
    weight: Tensor,
    beside: Tensor | None,
    states: Sequence[Tensor],
    counters: Sequence[Tensor],
    gradient: Tensor,
    factor: Tensor,
    noises: Sequence[Tensor | None],
    form: str,
    lr: float,
    *,
    maximize: bool,
    **options: Any,
) -> None:
    """Update one parameter in place by `OptimizerSpec.reference`, as an operator of `kernels.ops` does.

    Tensors are flat and contiguous; `factor` and `counters` have one element. `noises` are the random bits of each
    stream, None where nothing is rounded stochastically.
    """
    value = _take(form, weight, beside)
    gradient = gradient.float() * factor
    if maximize:
        gradient = -gradient
    value, *wide = rule(value, gradient, lr, *(state.float() for state in states), *counters, **options)
    for state, new, bits in zip(states, wide, noises[FIRST:], strict=False):
        _store(state, new, bits)
    _put(form, value, weight, beside, noises[WEIGHT])
