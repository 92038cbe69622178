"""A GAN: two models, two optimizers and two losses, each loss a `TrainStep`.

Steps that are given the same `scaler=` share one loss scale, as in torch's recipe for several losses. With a scaler
each, every loss finds the scale it needs. The generator's loss runs through the discriminator and updates the generator
alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

FP16 = hs.Policy.of("mixed", dtype="fp16")  # on a CPU without fp16 units: emulated
MEAN = torch.tensor([2.0, -1.0])


def mlp(inputs: int, outputs: int) -> nn.Module:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def make_scaler() -> hs.GradScaler:
    """Return a scaler that grows fast: it finds the largest scale that the gradients allow within a short run."""
    return hs.GradScaler("cpu", init_scale=2.0**12, growth_interval=10)


def train(
    policy: hs.Policy | str, scaler_d: hs.GradScaler | None, scaler_g: hs.GradScaler | None, updates: int = 300
) -> dict[str, float]:
    """Train a generator of a two-dimensional Gaussian; return its distance from the mean, and both scales."""
    torch.manual_seed(0)
    generator, discriminator = mlp(4, 2), mlp(2, 1)

    def generator_loss(model: nn.Module, noise: Tensor) -> Tensor:
        verdict = discriminator(model(noise))
        return F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))

    def discriminator_loss(model: nn.Module, real: Tensor, noise: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(noise)
        yes, no = model(real), model(fake)
        loss_yes = F.binary_cross_entropy_with_logits(yes, torch.ones_like(yes))
        return loss_yes + F.binary_cross_entropy_with_logits(no, torch.zeros_like(no))

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.99))

    step_d = hs.TrainStep(discriminator, adam(discriminator), discriminator_loss, policy=policy, scaler=scaler_d)
    step_g = hs.TrainStep(generator, adam(generator), generator_loss, policy=policy, scaler=scaler_g)
    data = torch.Generator().manual_seed(1)
    for _ in range(updates):
        real = MEAN + 0.5 * torch.randn(64, 2, generator=data)
        step_d(real, torch.randn(64, 4, generator=data))
        step_g(torch.randn(64, 4, generator=data))
    with torch.no_grad():
        samples = generator(torch.randn(2000, 4, generator=data)).float()
    return {
        "distance": float((samples.mean(dim=0) - MEAN).norm()),
        "scale_d": step_d.scaler.get_scale(),
        "scale_g": step_g.scaler.get_scale(),
    }


def main() -> dict[str, dict[str, float]]:
    """Train in fp32, and in fp16 with a shared scale and with a scale for each loss."""
    shared = make_scaler()
    runs = {
        "fp32": train("O0", None, None),
        "shared": train(FP16, shared, shared),
        "per_loss": train(FP16, make_scaler(), make_scaler()),
    }
    for name, run in runs.items():
        print(f"{name:9}", ", ".join(f"{what} {value:.3f}" for what, value in run.items()))
    return runs


if __name__ == "__main__":
    main()
