"""torch.amp.grad_scaler: the scaler with exactly torch's arguments."""

from typing import Any, ClassVar

import torch
from torch.amp.grad_scaler import OptState

import halfstep as hs
from halfstep.compat.torch_amp.served import installed

__all__ = ["GradScaler", "OptState"]


class GradScaler(hs.GradScaler):
    """`hs.GradScaler` with exactly torch.amp.GradScaler's arguments; the methods are torch's and more.

    While a policy is installed that names a scale, this takes their place.
    """

    def __init__(
        self, device: str | None = "cuda", init_scale: float = 2.0**16, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        """Make a scaler; see `hs.GradScaler` for the arguments."""
        rule = installed[0].rule() if installed else None
        if rule is None:
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        else:
            super().__init__(device, enabled=enabled, rule=rule)
        if installed and self.is_enabled():
            installed[0].scalers.append(self)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Do what `hs.GradScaler.step` does, and count it while a policy is installed."""
        before = installed[0].steps if installed else 0
        result = super().step(optimizer, *args, **kwargs)
        if installed and self.is_enabled():
            installed[0].scaled(self, before, self.skipped(optimizer))
        return result


class DevicelessGradScaler(GradScaler):
    """Base of the scalers of torch.cuda.amp and torch.cpu.amp, whose arguments name no device."""

    device: ClassVar[str | None]

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(self.device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
