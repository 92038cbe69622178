"""A training script in the style of timm, under a policy.

Two lines differ from such a script under torch.amp: `hs.prepare` takes the place of the autocast context, and
`hs.integrations.timm.NativeScaler` that of timm's. A third one lets the schedule wait for steps that are applied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import halfstep as hs


def make_data(count: int = 192) -> tuple[Tensor, Tensor]:
    """Return random images with a brighter quarter, and which one it is."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 4, (count,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 0.6
    return images, labels


def make_model(seed: int) -> nn.Module:
    """Return a small convolutional network; any of timm's models takes its place."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip


def train_one_epoch(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    loss_scaler: Any,
    schedule: LambdaLR,
    *,
    accumulate: int,
    clip_grad: float | None,
    clip_mode: str,
) -> float:
    """Train for one pass over `batches`; return the mean loss."""
    total = 0.0
    for index, (x, y) in enumerate(batches):
        window = min(accumulate, len(batches) - index // accumulate * accumulate)  # the last one may be shorter
        need_update = (index + 1) % accumulate == 0 or index + 1 == len(batches)
        loss = F.cross_entropy(model(x), y)
        loss_scaler(
            loss / window,
            optimizer,
            clip_grad=clip_grad,
            clip_mode=clip_mode,
            parameters=model.parameters(),
            need_update=need_update,
        )
        if need_update:
            optimizer.zero_grad()
            if not loss_scaler.skipped:
                schedule.step()
        total += float(loss.detach()) / len(batches)
    return total


def train(
    policy: str | hs.Policy,
    *,
    seed: int = 0,
    epochs: int = 5,
    clip_grad: float | None = 1.0,
    clip_mode: str = "norm",
) -> float:
    """Train a small network; return the loss in evaluation.

    Args:
        policy: what `hs.prepare` takes.
        seed: of the weights.
        epochs: passes over the data.
        clip_grad: as timm's ``--clip-grad``.
        clip_mode: as timm's ``--clip-mode``.
    """
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=policy)  # was: amp_autocast = torch.autocast(...)
    loss_scaler = hs.integrations.timm.NativeScaler(scaler)  # was: timm.utils.NativeScaler(device=...)
    schedule = LambdaLR(optimizer, lambda update: 1.0 / (1.0 + 0.02 * update))
    images, labels = make_data()
    batches = list(zip(images.split(24), labels.split(24), strict=True))
    options: dict[str, Any] = {"accumulate": 3, "clip_grad": clip_grad, "clip_mode": clip_mode}
    for _ in range(epochs):
        model.train()
        train_one_epoch(model, batches, optimizer, loss_scaler, schedule, **options)
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(images), labels))


def main() -> dict[str, float]:
    """Train in fp32 and under O2; return both losses."""
    losses = {name: train(name) for name in ("O0", "O2")}
    print("  ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    return losses


if __name__ == "__main__":
    main()
