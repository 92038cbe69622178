"""The meaning of the tail's operators (`ops`), one parameter at a time, in plain PyTorch.

Every product, sum and root is one fp32 operation rounded once, in the order written; twins do the same, so that they
agree bit for bit where the device's division and root are IEEE's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.kernels.reference.primitives import join_bf16, split_bf16, total_norm

__all__ = ["FIRST", "SECOND", "WEIGHT", "adam_", "judge", "lion_", "mix", "noise", "sgd_", "stochastic_bf16"]

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm, so equal settings clip equally
WORD = 0xFFFFFFFF
WEIGHT, FIRST, SECOND = range(3)
"""Streams of noise."""


# ------------------------------------------------------------------ verdict


def judge(norms: Tensor, divisor: Tensor | None, clip_norm: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Say from the norms of scaled gradients what becomes of the step.

    Args:
        norms: (n,) fp32 2-norms.
        divisor: 0-dim fp32, what unscales the gradients; None: they are not scaled.
        clip_norm: largest 2-norm of the unscaled gradient; None: no clipping.

    Returns:
        norm: 0-dim fp32, total 2-norm of the unscaled gradients.
        bad: 0-dim bool, whether it is not finite.
        factor: 0-dim fp32, what the update multiplies gradients by: ``1 / (divisor * max(1, (norm + 1e-6) / clip))``.
    """
    norm = total_norm(norms)
    one = torch.ones_like(norm)
    if divisor is not None:
        norm = norm / divisor
    bad = (norm - norm) != 0  # inf - inf is nan, and nan != 0
    whole = one if divisor is None else divisor.to(norm)
    if clip_norm is not None:
        whole = whole * ((norm + CLIP_EPS) / clip_norm).clamp(min=1.0)
    return norm, bad, one / whole


# ------------------------------------------------------------------ noise


def mix(word: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64: the constants of Chris Wellons' "lowbias32" (public domain, 2018)."""
    word = word & WORD
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return word ^ (word >> 16)


def noise(draws: Tensor, tensor: int, stream: int, count: int) -> Tensor:
    """Return 16 random bits for each element of a tensor: (count,) int64 in [0, 65536).

    Args:
        draws: (2,) int64: seed and count.
        tensor: which parameter.
        stream: WEIGHT, FIRST or SECOND.
        count: number of elements; the i-th in memory gets the i-th bits.
    """
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


# ------------------------------------------------------------------ forms


def _take(form: str, weight: Tensor, beside: Tensor | None) -> Tensor:
    """Return the precise value, fp32, new."""
    if form == "split":
        assert beside is not None
        return join_bf16(weight, beside)
    if form == "kahan":
        assert beside is not None
        return weight.float() + beside.float()
    return weight.to(torch.float32, copy=True)


def _put(form: str, value: Tensor, weight: Tensor, beside: Tensor | None, bits: Tensor | None) -> None:
    """Write a new precise value."""
    if form == "split":
        assert beside is not None
        low, rest = split_bf16(value)
        weight.copy_(low), beside.copy_(rest)
    elif form == "kahan":
        assert beside is not None
        for _ in range(2):  # the second time settles ties: packing the sum again must give the same two numbers
            low = value.to(weight.dtype)
            rest = (value - low.float()).nan_to_num_(0.0, 0.0, 0.0).to(weight.dtype)
            value = low.float() + rest.float()
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


def _root(square: Tensor) -> Tensor:
    """Return the square root rounded once: torch's own on CPU (2.13) misses the last bit for one number in five."""
    return square.double().sqrt().float()


# ------------------------------------------------------------------ updates
#
# Tensors here are flat and contiguous; `noises` are the bits of the streams, None where nothing is rounded by chance.

Noises = Sequence[Tensor | None]


def adam_(
    weight: Tensor,
    beside: Tensor | None,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    gradient: Tensor,
    factor: Tensor,
    noises: Noises,
    form: str,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Make one step of Adam (Kingma and Ba 2014), or AdamW (Loshchilov and Hutter 2017) if `decoupled`.

    The last arguments are torch.optim.AdamW's; bias corrections and ``lr / correction`` are worked out in fp64.
    """
    value = _take(form, weight, beside)
    step.add_(1)
    count = float(step)
    size = torch.tensor(lr / (1 - beta1**count), dtype=torch.float32)
    root = torch.tensor((1 - beta2**count) ** 0.5, dtype=torch.float32)
    slope = gradient.float() * factor
    if maximize:
        slope = -slope
    if decoupled:
        value = value * torch.tensor(1 - lr * weight_decay, dtype=torch.float32)
    elif weight_decay:
        slope = slope + value * torch.tensor(weight_decay, dtype=torch.float32)
    mean = first.float()
    mean = mean + (slope - mean) * torch.tensor(1 - beta1, dtype=torch.float32)
    square = second.float() * torch.tensor(beta2, dtype=torch.float32)
    square = square + slope * slope * torch.tensor(1 - beta2, dtype=torch.float32)
    value = value - size * (mean / (_root(square) / root + torch.tensor(eps, dtype=torch.float32)))
    _store(first, mean, noises[FIRST])
    _store(second, square, noises[SECOND])
    _put(form, value, weight, beside, noises[WEIGHT])


def sgd_(
    weight: Tensor,
    beside: Tensor | None,
    momentum_buffer: Tensor | None,
    gradient: Tensor,
    factor: Tensor,
    noises: Noises,
    form: str,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Make one step of SGD as torch.optim.SGD without dampening; `momentum_buffer` begins with zeros."""
    value = _take(form, weight, beside)
    slope = gradient.float() * factor
    if maximize:
        slope = -slope
    if weight_decay:
        slope = slope + value * torch.tensor(weight_decay, dtype=torch.float32)
    if momentum_buffer is not None:
        held = momentum_buffer.float() * torch.tensor(momentum, dtype=torch.float32) + slope
        _store(momentum_buffer, held, noises[FIRST])
        slope = slope + held * torch.tensor(momentum, dtype=torch.float32) if nesterov else held
    value = value - slope * torch.tensor(lr, dtype=torch.float32)
    _put(form, value, weight, beside, noises[WEIGHT])


def lion_(
    weight: Tensor,
    beside: Tensor | None,
    momentum_buffer: Tensor,
    gradient: Tensor,
    factor: Tensor,
    noises: Noises,
    form: str,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Make one step of Lion (Chen et al. 2023): the sign of an interpolation, and decoupled weight decay."""
    value = _take(form, weight, beside)
    slope = gradient.float() * factor
    if maximize:
        slope = -slope
    held = momentum_buffer.float()
    way = torch.sign(held + (slope - held) * torch.tensor(1 - beta1, dtype=torch.float32))
    value = value * torch.tensor(1 - lr * weight_decay, dtype=torch.float32)
    value = value - way * torch.tensor(lr, dtype=torch.float32)
    _store(momentum_buffer, held + (slope - held) * torch.tensor(1 - beta2, dtype=torch.float32), noises[FIRST])
    _put(form, value, weight, beside, noises[WEIGHT])
