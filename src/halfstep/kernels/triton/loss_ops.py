"""Operators of torch's dispatcher for losses of logits on CUDA, carried out by `triton_loss`.

Their schemas say what they read and write, so that counters, fake tensors and profilers see it. `cross_entropy` says
what they compute; it calls them where `usable` allows it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = ["losses", "slope", "usable"]

LIBRARY = torch.library.Library("halfstep", "FRAGMENT")
LIBRARY.define("losses(Tensor logits, Tensor target, Tensor? weight, int ignored, float smoothing) -> Tensor")
LIBRARY.define("slope(Tensor logits, Tensor label, Tensor own, Tensor every, Tensor scale, Tensor? by_class) -> Tensor")
losses = torch.ops.halfstep.losses.default
slope = torch.ops.halfstep.slope.default

LOWS = frozenset({torch.float16, torch.bfloat16})
PLAIN = frozenset({"Tensor", "Parameter", "FakeTensor"})
"""Classes whose memory is what it seems; by name, because fake tensors need not be imported."""

OLDEST = (7, 5)
"""Compute capability of the oldest device that Triton supports."""


def usable(logits: Tensor) -> bool:
    """Return whether the operators take these logits: low ones (N, C) on CUDA whose classes lie side by side."""
    return (
        logits.device.type == "cuda"
        and type(logits).__name__ in PLAIN
        and logits.dtype in LOWS
        and logits.dim() == 2
        and logits.stride(1) == 1
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and _there()
    )


@cache
def _there() -> bool:
    """Return whether Triton and a device for it are there, or no device at all: then tensors are fake."""
    if find_spec("triton") is None or torch.version.hip is not None:
        return False
    if torch.version.cuda is None:
        return True
    return all(torch.cuda.get_device_capability(i) >= OLDEST for i in range(torch.cuda.device_count()))


def _fake_losses(logits: Tensor, target: Tensor, weight: Tensor | None, ignored: int, smoothing: float) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def _fake_slope(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _losses(*arguments: Any) -> Tensor:
    from halfstep.kernels.triton import loss as triton_loss

    return triton_loss.losses(*arguments)


def _slope(*arguments: Any) -> Tensor:
    from halfstep.kernels.triton import loss as triton_loss

    return triton_loss.slope(*arguments)


torch.library.register_fake("halfstep::losses", _fake_losses, lib=LIBRARY)
torch.library.register_fake("halfstep::slope", _fake_slope, lib=LIBRARY)
LIBRARY.impl("losses", _losses, "CUDA")
LIBRARY.impl("slope", _slope, "CUDA")
