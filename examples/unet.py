"""A small U-Net (convolutions, transposed convolutions, a skip connection) that removes noise from images.

Under `O2` in fp16 all convolutions take and give fp16, and the concatenation of encoder and decoder features is fp16
too. On a CPU without fp16 units they are emulated, at about the speed of fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs


class UNet(nn.Module):
    """One level down, one level up, and the input's features beside the upsampled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 4, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.decode = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, height, width) to images of the same size."""
        features = self.encode(x)
        out: Tensor = self.decode(torch.cat([features, self.up(self.down(features))], dim=1))
        return out


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return noisy and clean images of a wave of random direction."""
    angle, phase = 6.3 * torch.rand(2, 16, 1, 1, 1, generator=generator)
    place = torch.arange(16.0)
    clean = (0.7 * (angle.cos() * place + angle.sin() * place[:, None]) + phase).sin()
    return clean + 0.5 * torch.randn(clean.shape, generator=generator), clean


def loss_fn(model: nn.Module, noisy: Tensor, clean: Tensor) -> Tensor:
    """Return the mean squared error of the restored images."""
    return F.mse_loss(model(noisy), clean)


def train(policy: hs.Policy) -> dict[str, float]:
    """Train under `policy`; return the loss of the first batch and the mean loss of the last ten."""
    torch.manual_seed(0)
    model = UNet()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy=policy)
    data = torch.Generator().manual_seed(1)
    losses = [float(step(*make_batch(data)).loss) for _ in range(80)]
    return {"first": losses[0], "last": sum(losses[-10:]) / 10}


def main() -> dict[str, dict[str, float]]:
    """Train in three formats."""
    policies = {"fp32": hs.Policy.of("O0")} | {d: hs.Policy.of("O2", dtype=d) for d in ("bf16", "fp16")}
    runs = {name: train(policy) for name, policy in policies.items()}
    for name, run in runs.items():
        print(f"{name}: loss {run['first']:.3f} -> {run['last']:.4f} (the noise is 0.25)")
    return runs


if __name__ == "__main__":
    main()
