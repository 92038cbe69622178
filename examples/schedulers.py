"""Learning-rate schedulers of every kind, and what a skipped step does to them.

A scheduler that moves once per update is given to the step: it advances after each update that was applied and not
after one that was skipped, so warm-up and decay are not used up by steps that changed nothing. Schedulers that move
once per epoch, and ReduceLROnPlateau, which wants a metric, stay in the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import halfstep as hs

EPOCHS, BATCHES = 6, 20
UPDATES = EPOCHS * BATCHES
# A loss scale that is too high at first comes down by skipping steps: here the schedulers see some.
FP16 = hs.Policy.of("mixed", dtype="fp16", scale=hs.ScaleRule(init=2.0**24))


def make_model() -> tuple[nn.Module, Optimizer]:
    """Return the same small network every time, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean squared error of a target that is a function of the input."""
    return F.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))


def epoch(step: hs.TrainStep, number: int) -> tuple[float, int]:
    """Train for one epoch; return its mean loss and the number of skipped steps."""
    generator = torch.Generator().manual_seed(number)
    results = [step(torch.randn(64, 8, generator=generator)) for _ in range(BATCHES)]
    step.flush()  # reads the verdict on the last update too
    return sum(float(r.loss) for r in results) / BATCHES, sum(int(r.skipped) for r in results)


def warmup_cosine(optimizer: Optimizer) -> LRScheduler:
    """Return a linear warm-up over a tenth of the updates, then a cosine to 0."""
    warmup = UPDATES // 10
    parts = [LinearLR(optimizer, 0.1, total_iters=warmup), CosineAnnealingLR(optimizer, UPDATES - warmup)]
    return SequentialLR(optimizer, parts, milestones=[warmup])


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    """Return the one-cycle schedule."""
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=UPDATES)


def per_update(make: Callable[[Optimizer], LRScheduler]) -> dict[str, float]:
    """Train with a scheduler that moves once per update."""
    model, optimizer = make_model()
    scheduler = make(optimizer)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=FP16, scheduler=scheduler)
    runs = [epoch(step, number) for number in range(EPOCHS)]
    return {
        "first": runs[0][0],
        "last": runs[-1][0],
        "skipped": sum(skipped for _, skipped in runs),
        "advanced": scheduler.last_epoch,
        "lr": float(scheduler.get_last_lr()[0]),
    }


def per_epoch(make: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]) -> dict[str, float]:
    """Train with a scheduler that the loop moves once per epoch."""
    model, optimizer = make_model()
    scheduler = make(optimizer)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=FP16)
    losses = []
    for number in range(EPOCHS):
        loss, _ = epoch(step, number)
        losses.append(loss)
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()
    return {
        "first": losses[0],
        "last": losses[-1],
        "advanced": scheduler.last_epoch,
        "lr": optimizer.param_groups[0]["lr"],
    }


def main() -> dict[str, dict[str, float]]:
    """Train with four schedulers; return losses, skipped steps, positions of the schedulers and learning rates."""
    runs = {
        "warmup_cosine": per_update(warmup_cosine),
        "one_cycle": per_update(one_cycle),
        "step": per_epoch(lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5)),
        "plateau": per_epoch(lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)),
    }
    for name, run in runs.items():
        print(f"{name:14}", ", ".join(f"{what} {value:.4g}" for what, value in run.items()))
    return runs


if __name__ == "__main__":
    main()
