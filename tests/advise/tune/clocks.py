"""A clock that only work moves, and a task whose products take less time in a low format: measured times are exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs


class WorkClock:
    """Seconds that the model's work has taken."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Work(nn.Module):
    """Gives its input back; takes `low` seconds in a low format and `wide` in fp32."""

    def __init__(self, clock: WorkClock, low: float, wide: float) -> None:
        super().__init__()
        self.clock, self.low, self.wide = clock, low, wide

    def __deepcopy__(self, memo: Any) -> Work:
        return Work(self.clock, self.low, self.wide)

    def forward(self, x: Tensor) -> Tensor:
        """Give `x` back, of any shape."""
        self.clock.now += self.wide if x.dtype is torch.float32 else self.low
        return x


def batches(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(16, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def work_task(clock: WorkClock, *, low: float = 0.5, wide: float = 1.0, **changes: Any) -> hs.Task:
    """Return a task that learns in 40 steps and whose time is that of `Work` behind each product."""
    fields: dict[str, Any] = {
        "name": "work",
        "model": lambda: nn.Sequential(
            nn.Linear(8, 8), Work(clock, low, wide), nn.Linear(8, 1), Work(clock, low, wide)
        ),
        "batches": batches,
        "loss_fn": loss_fn,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        "excerpt_steps": 40,
    }
    return hs.Task(**{**fields, **changes})
