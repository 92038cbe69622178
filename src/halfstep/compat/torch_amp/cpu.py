"""torch.cpu.amp without its deprecation warnings."""

from __future__ import annotations

import torch

from halfstep.compat.torch_amp import autocast_mode, grad_scaler

__all__ = ["GradScaler", "autocast"]


class autocast(autocast_mode.autocast):
    """torch.cpu.amp.autocast: bf16 on the CPU; fp16 is emulated where there are no units for it."""

    __slots__ = ()

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(grad_scaler.GradScaler):
    """torch.cpu.amp.GradScaler."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """Make a scaler; see `hs.GradScaler` for the arguments."""
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
