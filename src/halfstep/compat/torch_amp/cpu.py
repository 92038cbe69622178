"""torch.cpu.amp without its deprecation warnings."""

import torch

from halfstep.compat.torch_amp import autocast_mode as _base
from halfstep.compat.torch_amp.grad_scaler import DevicelessGradScaler

__all__ = ["GradScaler", "autocast"]


class autocast(_base.autocast):
    """torch.cpu.amp.autocast: bf16 on the CPU; fp16 is emulated where there are no units for it."""

    __slots__ = ()

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(DevicelessGradScaler):
    """torch.cpu.amp.GradScaler."""

    device = "cpu"
