"""A gradient penalty (WGAN-GP): the loss contains a gradient, so the backward pass differentiates twice.

The inner gradient is computed in the loss function. In fp16 it may underflow like any other, so the scores are scaled
for the inner backward pass and the penalty is computed from the unscaled gradient, in fp32. The outer loss is scaled by
the step as always.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep as hs

INNER_SCALE = 2.0**10
POLICIES = {"fp32": hs.Policy.of("O0")} | {d: hs.Policy.of("mixed", dtype=d) for d in ("bf16", "fp16")}


def make_critic() -> nn.Module:
    """Return the same critic of two-dimensional points every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Return the mean of (|gradient of the score at the point| - 1)^2 over points between real and fake ones."""
    share = torch.rand(len(real), 1, generator=torch.Generator().manual_seed(2))
    point = (share * real + (1 - share) * fake).requires_grad_()
    scores = critic(point).float().sum() * INNER_SCALE
    (gradient,) = torch.autograd.grad(scores, point, create_graph=True)
    lengths: Tensor = (gradient.float() / INNER_SCALE).norm(dim=1)
    return (lengths - 1).square().mean()


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    """Return the critic's loss and, beside it, its estimate of the distance between the two distributions."""
    distance = critic(real).float().mean() - critic(fake).float().mean()
    return 10 * gradient_penalty(critic, real, fake) - distance, distance


def penalty_gradient(policy: hs.Policy) -> Tensor:
    """Return the gradient of the penalty alone with respect to all weights, as one vector."""
    critic = make_critic()
    real, fake = batches(1)[0]
    model, optimizer, scaler = hs.prepare(critic, torch.optim.Adam(critic.parameters()), policy=policy)
    with hs.autocast(policy=policy):
        loss = gradient_penalty(model, real, fake)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return torch.cat([p.grad.flatten() for p in critic.parameters() if p.grad is not None])


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of real points, around (1, 1), and fake ones, around the origin."""
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, 64, 2, generator=generator) for _ in range(count)]
    return [(0.5 * real + 1, 0.5 * fake) for real, fake in pairs]


def main() -> dict[str, dict[str, float]]:
    """Train the critic in three formats; return its distance, the true one being sqrt(2), and the gradient's error."""
    exact = penalty_gradient(POLICIES["fp32"])
    runs = {}
    for name, policy in POLICIES.items():
        critic = make_critic()
        step = hs.TrainStep(critic, torch.optim.Adam(critic.parameters(), lr=1e-3), critic_loss, policy=policy)
        results = [step(real, fake) for real, fake in batches(120)]
        runs[name] = {
            "distance": float(torch.stack([r.aux for r in results[-20:]]).mean()),
            "gradient_error": float((penalty_gradient(policy) - exact).norm() / exact.norm()),
            "skipped": sum(int(r.skipped) for r in results),
        }
        print(f"{name}:", ", ".join(f"{what} {value:.5f}" for what, value in runs[name].items()))
    return runs


if __name__ == "__main__":
    main()
