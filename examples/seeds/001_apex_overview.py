"""The Apex part of "Automatic Mixed Precision Using PyTorch" (DigitalOcean), as a program that runs.

The document says: one line imports amp, one initialises model and optimizer (it describes O0 to O3), and the backward
pass goes into amp's context manager. What was changed: the import line, which said ``from apex import amp``. What was
added: a model, data and a loop, which the document leaves to its reader.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.compat.apex import amp


def train(opt_level: str) -> tuple[float, float]:
    """Train a small classifier; return its first and last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    pictures, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 2, (32,))
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main() -> dict[str, tuple[float, float]]:
    """Train at every level that the document describes."""
    return {level: train(level) for level in ("O0", "O1", "O2", "O3")}


if __name__ == "__main__":
    for name, (first, last) in main().items():
        print(f"{name}: {first:.4f} -> {last:.4f}")
