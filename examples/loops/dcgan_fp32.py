"""A DCGAN on 8x8 pictures of a bright spot: two networks, two optimizers and three losses, in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE, BATCH, UPDATES = 8, 32, 80


def make_pictures(count: int) -> Tensor:
    """Return pictures (count, 1, 8, 8) in [-1, 1] of a spot near the upper left corner."""
    centre = 2.5 + 0.5 * torch.randn(count, 2, 1, 1)
    rows, columns = torch.arange(8.0)[:, None], torch.arange(8.0)[None, :]
    distance = (rows - centre[:, :1]) ** 2 + (columns - centre[:, 1:]) ** 2
    return 2 * torch.exp(-distance / 4) - 1


def make_generator() -> nn.Module:
    """Return a network from noise (batch, NOISE, 1, 1) to pictures."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh()
    )


def make_discriminator() -> nn.Module:
    """Return a network from pictures to one logit each: whether the picture is real."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 16, 4),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(16, 1),
    )


def judge(logits: Tensor, real: float) -> Tensor:
    """Return the loss of `logits` for pictures that are all `real` (1) or not (0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def distance(generator: nn.Module) -> float:
    """Return how far the mean of generated pictures is from that of real ones, as an RMS over the pixels."""
    with torch.no_grad():
        fake = generator(torch.randn(512, NOISE, 1, 1))
    return float((fake.mean(dim=0) - make_pictures(512).mean(dim=0)).square().mean().sqrt())


def main(seed: int = 0) -> float:
    """Train both networks; return the distance of the generated pictures from the real ones."""
    torch.manual_seed(seed)
    generator, discriminator = make_generator(), make_discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for update in range(UPDATES):
        real, noise = make_pictures(BATCH), torch.randn(BATCH, NOISE, 1, 1)
        fake = generator(noise)
        optimizer_g.zero_grad()
        loss_g = judge(discriminator(fake), 1.0)
        loss_g.backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        loss_real = judge(discriminator(real), 1.0)
        loss_real.backward()
        loss_fake = judge(discriminator(fake.detach()), 0.0)
        loss_fake.backward()
        optimizer_d.step()
        if update % 20 == 0:
            print(f"{update:4}: real {loss_real:.3f}, fake {loss_fake:.3f}, generator {loss_g:.3f}")
    return distance(generator)


if __name__ == "__main__":
    print(f"distance {main():.4f}")
