"""A siamese network: one network looks at both pictures of a pair and tells whether they show the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

KINDS, BATCH, UPDATES = 8, 64, 80


def make_pairs(kinds: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two batches of noisy pictures (count, 1, 8, 8), and 1.0 where both are of one of `kinds`, else 0.0."""
    first, second = torch.randint(KINDS, (2, count))
    second = torch.where(torch.rand(count) < 0.5, first, second)
    left, right = (kinds[chosen] + 0.7 * torch.randn(count, 1, 8, 8) for chosen in (first, second))
    return left, right, (first == second).float()


class Siamese(nn.Module):
    """A network of a picture, called twice, and a linear layer on the distance of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32)
        )
        self.head = nn.Linear(32, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Map pairs of pictures to one logit each."""
        logits: Tensor = self.head((self.look(left) - self.look(right)).abs())
        return logits.squeeze(-1)


def loss_fn(model: nn.Module, left: Tensor, right: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and the share of right answers."""
    logits = model(left, right)
    return F.binary_cross_entropy_with_logits(logits, same), ((logits > 0) == (same > 0)).float().mean()


def main(seed: int = 0, policy: hs.Policy | str = "mixed") -> float:
    """Train on pairs; return the loss on pairs that it has not seen (chance: 0.69)."""
    torch.manual_seed(seed)
    kinds = torch.randn(KINDS, 1, 8, 8)
    model = Siamese()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy)
    for update in range(UPDATES):
        result = step(*make_pairs(kinds, BATCH))
        if update % 20 == 0:
            print(f"{update:4}: loss {result.loss:.3f}, accuracy {result.aux:.2f}")
    loss, accuracy = step.evaluate(*make_pairs(kinds, 1024))
    print(f"unseen pairs: accuracy {accuracy:.3f}")
    return float(loss)


if __name__ == "__main__":
    print(f"loss {main():.4f}")
