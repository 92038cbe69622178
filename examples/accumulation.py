"""Gradient accumulation over micro-batches, with a last window that is shorter than the others.

`accumulate=4` makes one update of every four micro-batches, with the mean of their gradients. Ten micro-batches leave a
window of two at the end of each epoch; `flush` updates with the mean of those two. The result is that of batches of
64, 64 and 32 in plain PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

MICRO_BATCH, ACCUMULATE, EPOCHS = 16, 4, 10


def make_data() -> tuple[Tensor, Tensor]:
    """Return 160 points in 8 dimensions and a target that is not linear in them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(160, 8, generator=generator)
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3]).tanh()


def make_model() -> nn.Module:
    """Return the same small network every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(x), y)


def train(policy: hs.Policy | str) -> tuple[nn.Module, int]:
    """Train in micro-batches under `policy`; return the model and the number of updates."""
    x, y = make_data()
    model = make_model()
    step = hs.TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy=policy, accumulate=ACCUMULATE
    )
    updates = 0
    for _ in range(EPOCHS):
        for batch in zip(x.split(MICRO_BATCH), y.split(MICRO_BATCH), strict=True):
            updates += int(step(*batch).updated)
        short = step.flush()  # None when the epoch ended with a whole window
        updates += 0 if short is None else int(short.updated)
    return model, updates


def train_in_large_batches() -> nn.Module:
    """Train in plain PyTorch on the large batches that the windows stand for."""
    x, y = make_data()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for batch in zip(x.split(MICRO_BATCH * ACCUMULATE), y.split(MICRO_BATCH * ACCUMULATE), strict=True):
            optimizer.zero_grad()
            loss_fn(model, *batch).backward()
            optimizer.step()
    return model


def main() -> dict[str, float]:
    """Train both ways in fp32, then in bf16; return the losses over all data and the number of updates."""
    x, y = make_data()
    losses = {"before": float(loss_fn(make_model(), x, y).detach())}
    losses["large_batches"] = float(loss_fn(train_in_large_batches(), x, y).detach())
    model, updates = train("O0")
    losses["micro_batches"] = float(loss_fn(model, x, y).detach())
    model, _ = train(hs.Policy.of("mixed", dtype="bf16"))
    losses["micro_batches_bf16"] = float(loss_fn(model, x, y).detach())
    print(f"{updates} updates in {EPOCHS} epochs of 10 micro-batches: windows of 4, 4 and 2")
    print(", ".join(f"{name} {value:.5f}" for name, value in losses.items()))
    return {**losses, "updates": updates}


if __name__ == "__main__":
    main()
