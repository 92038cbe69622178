"""Parametrised weights: weight norm, spectral norm and an orthogonal layer, under low weights with fp32 masters.

What makes a weight from parameters is short and sensitive (a power iteration, a matrix exponential), so one rule keeps
it in fp32 and the layers around it stay low. The promises then hold as exactly as in fp32: a spectral norm of 1, and a
matrix whose inverse is its transpose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import halfstep as hs

IN_FP32 = {"*.parametrizations*": "fp32"}


class Net(nn.Module):
    """Three hidden layers, each with another parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = weight_norm(nn.Linear(8, 64))
        self.bounded = spectral_norm(nn.Linear(64, 64))
        self.rotation = orthogonal(nn.Linear(64, 64))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 1)."""
        h = self.rotation(F.gelu(self.bounded(F.gelu(self.normed(x)))))
        out: Tensor = self.head(F.gelu(h))
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared error of a target that is a function of the input."""
    return F.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))


def train(policy: hs.Policy) -> dict[str, float]:
    """Train under `policy`; return losses, the layer's spectral norm and how far the rotation is from orthogonal."""
    torch.manual_seed(0)
    model = Net()
    step = hs.TrainStep(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss_fn, policy=policy)
    data = torch.Generator().manual_seed(1)
    losses = [float(step(torch.randn(64, 8, generator=data)).loss) for _ in range(150)]

    hs.unprepare(model).eval()  # fp32 weights again: now the parametrisations can be folded into plain weights
    for layer in (model.normed, model.bounded, model.rotation):
        parametrize.remove_parametrizations(layer, "weight")
    weights = model.state_dict()
    rotation = weights["rotation.weight"]
    return {
        "first": losses[0],
        "last": losses[-1],
        "spectral_norm": float(torch.linalg.matrix_norm(weights["bounded.weight"], ord=2)),
        "not_orthogonal": float((rotation.T @ rotation - torch.eye(64)).abs().max()),
        "plain_weights": len(weights),
    }


def main() -> dict[str, dict[str, float]]:
    """Train in fp32, in bf16 and in fp16."""
    runs = {"fp32": train(hs.Policy.of("O0"))}
    for dtype in ("bf16", "fp16"):
        runs[dtype] = train(hs.Policy.of("O2", dtype=dtype).with_modules(IN_FP32))
    for name, run in runs.items():
        print(f"{name}: loss {run['first']:.3f} -> {run['last']:.3f}, ", end="")
        print(f"spectral norm {run['spectral_norm']:.5f}, orthogonal within {run['not_orthogonal']:.0e}")
    return runs


if __name__ == "__main__":
    main()
