"""Save a run in the middle and resume it bit for bit: the interrupted run ends where the uninterrupted one does.

`hs.save` writes what the step owns (fp32 weights, buffers, the optimizer, the scale, the scheduler) and the global
random generators, which dropout draws from. What the step does not own goes into `extra`: here the generator of the
data.
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

UPDATES, INTERRUPTED_AT = 60, 23


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(x), y)


def make_run(seed: int) -> tuple[hs.TrainStep, torch.Generator]:
    """Return a training step with fp16 weights and fp32 masters, and the generator its batches come from."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    policy = hs.Policy.of("O2", dtype="fp16", scale=hs.ScaleRule(init=2.0**20, interval=10))
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy, scheduler=scheduler, clip_norm=1.0)
    return step, torch.Generator().manual_seed(seed)


def run(step: hs.TrainStep, data: torch.Generator, count: int) -> list[float]:
    """Make `count` steps; return their losses."""
    losses = []
    for _ in range(count):
        x = torch.randn(64, 8, generator=data)
        losses.append(float(step(x, x[:, :1] * x[:, 1:2]).loss))
    return losses


def main() -> dict[str, float]:
    """Train once without and once with an interruption; return how many losses and weights differ."""
    step, data = make_run(seed=0)
    whole = run(step, data, UPDATES)
    weights = step.model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        first, data = make_run(seed=0)
        losses = run(first, data, INTERRUPTED_AT)
        hs.save(first, folder, extra={"data": data.get_state()})
        second, data = make_run(seed=99)  # another process would have other numbers everywhere
        data.set_state(hs.load(second, folder).extra["data"])
    losses += run(second, data, UPDATES - INTERRUPTED_AT)
    different_losses = sum(a != b for a, b in zip(whole, losses, strict=True))
    resumed = second.model.state_dict()
    different_weights = sum(not torch.equal(weights[name], resumed[name]) for name in weights)
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}; interrupted after {INTERRUPTED_AT} of {UPDATES} steps")
    print(f"{different_losses} losses and {different_weights} of {len(weights)} tensors differ")
    return {
        "first": whole[0],
        "last": whole[-1],
        "different_losses": different_losses,
        "different_weights": different_weights,
    }


if __name__ == "__main__":
    main()
