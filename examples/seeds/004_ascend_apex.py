"""The page "Enabling mixed precision" of Huawei's Ascend documentation, which recommends Apex, as a program that runs.

Its five calls of ``amp.initialize`` are in `WAYS`, unchanged. What was changed: the import line, which said
``from apex import amp``. What was added: a model, data and a loop around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.compat.apex import amp


def o1(model: Any, optimizer: Any) -> Any:
    """The page's line for O1."""
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    return model, optimizer


def o2(model: Any, optimizer: Any) -> Any:
    """The page's line for O2."""
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    return model, optimizer


def o3(model: Any, optimizer: Any) -> Any:
    """The page's line for O3."""
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3")
    return model, optimizer


def static(model: Any, optimizer: Any) -> Any:
    """The page's line for a static loss scale."""
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    return model, optimizer


def dynamic(model: Any, optimizer: Any) -> Any:
    """The page's line for a dynamic loss scale."""
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
    return model, optimizer


WAYS: dict[str, Callable[[Any, Any], Any]] = {"O1": o1, "O2": o2, "O3": o3, "static": static, "dynamic": dynamic}


def train(way: Callable[[Any, Any], Any]) -> tuple[float, float]:
    """Train a small classifier; return its first and last loss."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = way(model, optimizer)
    inputs, targets = torch.randn(32, 8), torch.randint(0, 2, (32,))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main() -> dict[str, tuple[float, float]]:
    """Train in every way that the page shows."""
    return {name: train(way) for name, way in WAYS.items()}


if __name__ == "__main__":
    for name, (first, last) in main().items():
        print(f"{name}: {first:.4f} -> {last:.4f}")
