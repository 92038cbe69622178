"""torch.cpu.amp.grad_scaler."""

from __future__ import annotations

from halfstep.compat.torch_amp.grad_scaler import DevicelessGradScaler

__all__ = ["GradScaler"]


class GradScaler(DevicelessGradScaler):
    """torch.cpu.amp.GradScaler."""

    device = "cpu"
