"""torch.amp.grad_scaler: the scaler with exactly torch's arguments."""

from __future__ import annotations

from typing import ClassVar

from torch.amp.grad_scaler import OptState

import halfstep as hs

__all__ = ["GradScaler", "OptState"]


class GradScaler(hs.GradScaler):
    """`hs.GradScaler` with exactly torch.amp.GradScaler's arguments; the methods are torch's and more."""

    def __init__(
        self, device: str | None = "cuda", init_scale: float = 2.0**16, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        """Make a scaler; see `hs.GradScaler` for the arguments."""
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


class DevicelessGradScaler(GradScaler):
    """Base of the scalers of torch.cuda.amp and torch.cpu.amp, whose arguments name no device."""

    device: ClassVar[str | None]

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(self.device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
