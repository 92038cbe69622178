"""What the programs of the second set share: policies, optimizers, seeded data and the plainest loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from tests.faults.case import generator

__all__ = ["ALL", "BF16", "FULL", "MIXED", "TORCH", "Edit", "adam", "at", "classify", "labels", "normal", "tokens"]

MIXED = hs.Policy.of("mixed", dtype="fp16", scale=128.0)
TORCH = hs.Policy.of("torch", dtype="fp16", scale=128.0)
BF16 = hs.Policy.of("mixed", dtype="bf16")
FULL = hs.Policy.of("O0")
ALL = ("op fp32", "module fp32", "bf16")
"""The cures of what only fp16 is too small for."""

Edit = Callable[[int], None]


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def normal(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(step))


def labels(step: int, count: int, kinds: int = 4) -> Tensor:
    return torch.randint(0, kinds, (count,), generator=generator(step + 500))


def tokens(step: int, shape: tuple[int, ...], high: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator(step))


def classify(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def at(step: int, edit: Callable[[], Any]) -> Edit:
    """Return a function for `Case.before` that calls `edit`, without gradients, before one step."""

    def before(number: int) -> None:
        if number == step:
            with torch.no_grad():
                edit()

    return before
