"""A diffusion model (DDPM) of points on a circle, with windows of four micro-batches and a short last one, in fp32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIMES, BATCH, BATCHES, EPOCHS, WINDOW = 20, 256, 10, 32, 4
BETAS = torch.linspace(1e-3, 0.3, TIMES)
KEPT = torch.cumprod(1 - BETAS, dim=0)  # how much of a point is left at each time


def make_points(count: int) -> Tensor:
    """Return points (count, 2) near the unit circle."""
    angle = 2 * math.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


class Denoiser(nn.Module):
    """Predicts the noise in points at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, 64)
        self.enter = nn.Linear(2, 64)
        layers = [nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)]
        self.rest = nn.Sequential(*layers)

    def forward(self, points: Tensor, times: Tensor) -> Tensor:
        """Map noisy points (batch, 2) and their times (batch,) to the noise in them."""
        noise: Tensor = self.rest(self.enter(points) + self.time(times))
        return noise


def loss_fn(model: nn.Module, points: Tensor) -> Tensor:
    """Return the squared error of the predicted noise, at random times."""
    times, noise = torch.randint(TIMES, (len(points),)), torch.randn_like(points)
    kept = KEPT[times, None]
    return F.mse_loss(model(kept.sqrt() * points + (1 - kept).sqrt() * noise, times), noise)


@torch.no_grad()
def sample(model: nn.Module, count: int) -> Tensor:
    """Return points made from noise."""
    points = torch.randn(count, 2)
    for time in reversed(range(TIMES)):
        noise = model(points, torch.full((count,), time))
        points = (points - BETAS[time] / (1 - KEPT[time]).sqrt() * noise) / (1 - BETAS[time]).sqrt()
        if time:
            points = points + BETAS[time].sqrt() * torch.randn(count, 2)
    return points


def main(seed: int = 0) -> float:
    """Train; return the mean distance of sampled points from the circle (0.04 for the data, 0.5 for noise)."""
    torch.manual_seed(seed)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for epoch in range(EPOCHS):
        batches = make_points(BATCH * BATCHES).split(BATCH)
        for at in range(0, BATCHES, WINDOW):
            window = batches[at : at + WINDOW]  # the last one of an epoch has two batches
            optimizer.zero_grad()
            for points in window:
                loss = loss_fn(model, points)
                (loss / len(window)).backward()
            optimizer.step()
        if epoch % 8 == 0:
            print(f"{epoch:4}: loss {loss:.3f}")
    return float((sample(model, 2000).norm(dim=1) - 1).abs().mean())


if __name__ == "__main__":
    print(f"distance {main():.4f}")
