"""A long run under watch: gradients that fade away in fp16, found by samples of the run and cured by what they say.

A deep network of sigmoids makes its gradients smaller in every layer. In fp16 without a loss scale those of the first
layers become subnormal, then zero, and nothing fails: the loss falls, only slowly. `hs.Monitor` looks at every tenth
update, finds it, and names the change; with that scale there is nothing left to find.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

DEPTH, WIDTH, STEPS, EVERY = 6, 16, 40, 10


def make_model() -> nn.Module:
    """Return a deep network of sigmoids."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 4))


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return points and their quadrants."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
    return x, (x[:, 0] > 0) * 2 + (x[:, 1] > 0).long()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy."""
    return F.cross_entropy(model(x), y)


def watched(policy: hs.Policy) -> tuple[list[float], tuple[str, ...]]:
    """Train under watch; return the share of the first gradient that is lost or nearly so, and what is wrong."""
    model = make_model()
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, policy=policy)
    monitor = hs.Monitor(step, every=EVERY)
    shares = []
    for number in range(STEPS):
        step(*batch(number))
        for record in monitor.poll():  # nothing, until a sample has arrived
            first = next(p for p in record.parameters if p.name == "0.weight")
            shares.append(first.zeros + (1 - first.zeros) * first.subnormal[1])
            print(f"step {record.step}: scale {record.scale:g}, first layer {first.gradient}, lost {shares[-1]:.0%}")
    for finding in monitor.findings():
        print(finding)
    return shares, tuple(finding.kind for finding in monitor.findings())


def main() -> dict[str, tuple[list[float], tuple[str, ...]]]:
    """Train without a loss scale, then with one."""
    found = {}
    for scale in ("none", "auto"):
        print(f"scale={scale!r}")
        found[scale] = watched(hs.Policy.of("mixed", dtype="fp16", scale=scale))
    return found


if __name__ == "__main__":
    main()
