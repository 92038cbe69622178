"""Compiled training: `TrainStep(..., compile=True)` compiles the loss and its backward pass, policy included.

A prepared model can also be compiled by hand; then prepare first, and the loss stays eager. `fullgraph=True` proves
that the policy breaks no graph. On CUDA, `cuda_graph=True` beside it captures the whole step (`docs/capture.md`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs


class Net(nn.Module):
    """A residual network of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 1)."""
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        out: Tensor = self.head(h)
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared error of a target that is a function of the input."""
    return F.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))


def train(policy: hs.Policy, backend: str) -> list[float]:
    """Train under `policy`, compiled by `backend` ("" for eager); return the losses."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    options = {"backend": backend, "fullgraph": True} if backend else False
    step = hs.TrainStep(net, optimizer, loss_fn, policy=policy, compile=options)
    return losses(step)


def train_by_hand(policy: hs.Policy, backend: str) -> list[float]:
    """Do the same with a model that is prepared, then compiled."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer, scaler = hs.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), policy=policy)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    step = hs.TrainStep(compiled, optimizer, loss_fn, scaler=scaler)  # type: ignore[arg-type]  # a module gives one
    return losses(step)


def losses(step: hs.TrainStep) -> list[float]:
    """Train on 60 random batches."""
    data = torch.Generator().manual_seed(1)
    return [float(step(torch.randn(64, 8, generator=data)).loss) for _ in range(60)]


def main(backend: str = "inductor") -> dict[str, dict[str, float]]:
    """Train eager and compiled under two policies; return losses. Compiling takes inductor about ten seconds each."""
    policies = {"mixed bf16": hs.Policy.of("mixed", dtype="bf16"), "O2 fp16": hs.Policy.of("O2", dtype="fp16")}
    runs = {}
    for name, policy in policies.items():
        eager, compiled = train(policy, ""), train(policy, backend)
        by_hand = train_by_hand(policy, backend)
        runs[name] = {"first": compiled[0], "last": compiled[-1], "first_eager": eager[0], "last_eager": eager[-1]}
        runs[name]["last_by_hand"] = by_hand[-1]
        print(f"{name}: loss {compiled[0]:.3f} -> {compiled[-1]:.4f}, eager {eager[0]:.3f} -> {eager[-1]:.4f}")
    return runs


if __name__ == "__main__":
    main()
