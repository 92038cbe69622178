"""torch.cuda.amp without its deprecation warnings: calls that name no device.

Where torch finds no CUDA it switches itself off; here the same lines run on the CPU, with fp16 emulated, so that a
program written for a GPU can be tested anywhere with a GPU's numerics.
"""

from collections.abc import Callable
from typing import Any

import torch

from halfstep.compat.torch_amp import autocast_mode as _base
from halfstep.compat.torch_amp.grad_scaler import DevicelessGradScaler

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]


def here() -> str:
    """Return the device type that stands for CUDA."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class autocast(_base.autocast):
    """torch.cuda.amp.autocast: fp16 on CUDA, or emulated on the CPU where there is none."""

    __slots__ = ()

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__(here(), dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate ``forward`` of an autograd.Function; see `halfstep.compat.torch_amp.custom_fwd`."""
    return _base.custom_fwd(fwd, device_type=here(), cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Decorate ``backward`` of an autograd.Function; see `halfstep.compat.torch_amp.custom_bwd`."""
    return _base.custom_bwd(bwd, device_type=here())


class GradScaler(DevicelessGradScaler):
    """torch.cuda.amp.GradScaler: works where the loss is."""

    device = None


def amp_definitely_not_available() -> bool:
    """Return False: mixed precision works on every machine, if need be emulated."""
    return False
