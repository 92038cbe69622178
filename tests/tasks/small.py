"""A task of microseconds: a line through points."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs


def batches(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(16, 8, generator=generator)
    return x, 0.02 * x.sum(1, keepdim=True)  # small: the first scale, 65536, overflows nothing in fp16


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def metric(model: nn.Module) -> float:
    return float(loss_fn(model, *batches(99, 99)))


def small_task(**changes: Any) -> hs.Task:
    """Return the task, with some fields replaced."""
    task = hs.Task(
        name="small",
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)),
        batches=batches,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        metric=metric,
        margin=0.5,
        steps=20,
        excerpt_steps=8,
    )
    return dataclasses.replace(task, **changes)
