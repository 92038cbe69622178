"""torch.cuda.amp.grad_scaler."""

from __future__ import annotations

import halfstep as hs
from halfstep.compat.torch_amp import grad_scaler as _base

__all__ = ["GradScaler"]


class GradScaler(_base.GradScaler):
    """torch.cuda.amp.GradScaler: works where the loss is."""

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        """Make a scaler; see `hs.GradScaler` for the arguments."""
        hs.GradScaler.__init__(self, None, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
