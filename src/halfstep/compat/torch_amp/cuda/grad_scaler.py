"""torch.cuda.amp.grad_scaler."""

from __future__ import annotations

from halfstep.compat.torch_amp.grad_scaler import DevicelessGradScaler

__all__ = ["GradScaler"]


class GradScaler(DevicelessGradScaler):
    """torch.cuda.amp.GradScaler: works where the loss is."""

    device = None
