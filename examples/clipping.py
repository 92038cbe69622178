"""Gradient clipping by norm and by value, with a scaled loss, on data with outliers.

`clip_norm` and `clip_value` act on the true gradients, whatever the loss scale; `result.grad_norm` is the norm before
clipping. An update of plain SGD, divided by the learning rate, is the clipped gradient, so its size can be read off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

FP16 = hs.Policy.of("mixed", dtype="fp16")  # on a CPU without fp16 units: emulated


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Return batches of a regression problem; every eighth has targets a hundred times too large."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for i in range(200):
        x = torch.randn(32, 8, generator=generator)
        y = x.sin().sum(dim=1, keepdim=True)
        batches.append((x, 100 * y if i % 8 == 7 else y))
    return batches


def make_model() -> nn.Module:
    """Return the same small network every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(x), y)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters as one vector, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(
    policy: hs.Policy | str, lr: float, *, clip_norm: float | None = None, clip_value: float | None = None
) -> dict[str, float]:
    """Train once; return the largest gradient, the largest update and the loss over the batches without outliers."""
    model, batches = make_model(), make_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy, clip_norm=clip_norm, clip_value=clip_value)
    seen = {"grad_norm": 0.0, "update_norm": 0.0, "update_value": 0.0}
    for x, y in batches:
        before = flat(model)
        result = step(x, y).host()
        update = (flat(model) - before) / lr
        seen["grad_norm"] = max(seen["grad_norm"], result.grad_norm if result.updated else 0.0)
        seen["update_norm"] = max(seen["update_norm"], float(update.norm()))
        seen["update_value"] = max(seen["update_value"], float(update.abs().max()))
    with torch.no_grad():
        losses = [float(loss_fn(model, x, y)) for i, (x, y) in enumerate(batches) if i % 8 != 7]
    return {**seen, "loss": sum(losses) / len(losses)}


def main() -> dict[str, dict[str, float]]:
    """Train with either clip, in fp32 and fp16; return what `train` returns for each."""
    runs = {
        "norm": train(FP16, 0.1, clip_norm=1.0),
        "norm_fp32": train("O0", 0.1, clip_norm=1.0),
        "value": train(FP16, 0.1, clip_value=0.1),
        "value_fp32": train("O0", 0.1, clip_value=0.1),
    }
    for name, run in runs.items():
        print(f"{name:10}", ", ".join(f"{what} {value:.4f}" for what, value in run.items()))
    return runs


if __name__ == "__main__":
    main()
