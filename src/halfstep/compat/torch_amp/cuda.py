"""torch.cuda.amp without its deprecation warnings: calls that name no device.

Where torch finds no CUDA it switches itself off; here the same lines run on the CPU, with fp16 emulated, so that a
program written for a GPU can be tested anywhere with a GPU's numerics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.compat.torch_amp import autocast_mode, grad_scaler

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class autocast(autocast_mode.autocast):
    """torch.cuda.amp.autocast: fp16 on CUDA, or emulated on the CPU where there is none."""

    __slots__ = ()

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__(_device(), dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(grad_scaler.GradScaler):
    """torch.cuda.amp.GradScaler: works where the loss is."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """Make a scaler; see `hs.GradScaler` for the arguments."""
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate ``forward`` of an autograd.Function; see `autocast_mode.custom_fwd`."""
    return autocast_mode.custom_fwd(fwd, device_type=_device(), cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Decorate ``backward`` of an autograd.Function; see `autocast_mode.custom_bwd`."""
    return autocast_mode.custom_bwd(bwd, device_type=_device())


def amp_definitely_not_available() -> bool:
    """Return False: mixed precision works on every machine, if need be emulated."""
    return False
