"""`ops.adam_`, `ops.sgd_` and `ops.lion_` in Triton: one launch for all parameters whose formats agree.

Adam takes a launch more, which counts the steps and works out the bias corrections. When `bad`, programs end before
they touch anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.kernels.triton.launch import FAITHFUL, KINDS, on
from halfstep.kernels.triton.tables import Plan, plan
from halfstep.kernels.triton.update_kernels import count_kernel, update_kernel

__all__ = ["adam_", "lion_", "sgd_"]

BLOCK = 1024
"""Numbers a program works on at a time: four for each thread, 16 bytes of fp32, so that all formats have one layout."""

UPDATE = {**FAITHFUL, "num_warps": BLOCK // 128}

FEW = 128
"""Step counters a program advances."""

BITS = 31
"""Binary digits of a step count; fp32 counters stop at 2**24."""


def adam_(
    weights: Sequence[Tensor],
    beside: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factor: Tensor,
    bad: Tensor,
    draws: Tensor | None,
    start: int,
    form: str,
    rate: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    """Make one step of Adam or AdamW for every parameter: `ops.adam_`, in two launches if formats agree."""
    device = gradients[0].device
    with on(device):
        lists = (weights, beside, first, second, steps, gradients)
        walk = plan(lists, BLOCK, start)
        count = len(gradients)
        corrections = torch.empty(count, 2, dtype=torch.float32, device=device)
        count_kernel[(-(-count // FEW),)](
            walk.rows,
            corrections,
            bad,
            rate,
            count,
            _bits(lr),
            _bits(beta1),
            _bits(beta2),
            FEW=FEW,
            BITS=BITS,
            **FAITHFUL,
        )
        numbers = (1 - beta1, beta2, 1 - beta2, eps)
        given = (corrections, factor, bad, draws, rate)
        _update(walk, count, given, lr, weight_decay, numbers, "adam", form, decoupled, maximize)


def sgd_(
    weights: Sequence[Tensor],
    beside: Sequence[Tensor],
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factor: Tensor,
    bad: Tensor,
    draws: Tensor | None,
    start: int,
    form: str,
    rate: Tensor | None,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Make one step of SGD for every parameter: `ops.sgd_`, in one launch if formats agree."""
    with on(gradients[0].device):
        walk = plan((weights, beside, momenta, (), (), gradients), BLOCK, start)
        given = (None, factor, bad, draws, rate)
        numbers = (momentum, 0.0, 0.0, 0.0)
        _update(walk, len(gradients), given, lr, weight_decay, numbers, "sgd", form, nesterov, maximize)


def lion_(
    weights: Sequence[Tensor],
    beside: Sequence[Tensor],
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    factor: Tensor,
    bad: Tensor,
    draws: Tensor | None,
    start: int,
    form: str,
    rate: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Make one step of Lion for every parameter: `ops.lion_`, in one launch if formats agree."""
    with on(gradients[0].device):
        walk = plan((weights, beside, momenta, (), (), gradients), BLOCK, start)
        given = (None, factor, bad, draws, rate)
        numbers = (1 - beta1, 1 - beta2, 0.0, 0.0)
        _update(walk, len(gradients), given, lr, weight_decay, numbers, "lion", form, False, maximize)


def _update(
    walk: Plan,
    count: int,
    given: tuple[Tensor | None, ...],
    lr: float,
    weight_decay: float,
    numbers: tuple[float, ...],
    method: str,
    form: str,
    variant: bool,
    maximize: bool,
) -> None:
    """Launch `update_kernel` for each combination of formats; `given` and `numbers` are its arguments of the middle."""
    for launch in walk.launches:
        weight, beside, first, second, _, gradient = (KINDS[dtype] for dtype in launch.dtypes)
        update_kernel[(launch.programs,)](
            walk.rows,
            walk.chunks,
            *given,
            count,
            launch.first,
            _bits(lr),
            _bits(weight_decay),
            float(weight_decay),
            *map(float, numbers),
            METHOD=method,
            FORM=form if form != "copy" or beside != "none" else "plain",
            WEIGHT=weight,
            BESIDE=beside,
            FIRST=first,
            SECOND=second,
            GRADIENT=gradient,
            VARIANT=bool(variant),
            DECAYS=bool(weight_decay),
            MAXIMIZE=bool(maximize),
            ALIGNED=launch.aligned,
            CHUNK=walk.chunk,
            BLOCK=BLOCK,
            **UPDATE,
        )


def _bits(number: float) -> int:
    """Return the pattern of `number` as fp64."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
