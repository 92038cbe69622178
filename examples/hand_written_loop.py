"""A loop written for torch.amp, with `hs.autocast` and `hs.GradScaler` in place of torch's.

Two lines change. On a CPU the fp16 operators are emulated, so the loop runs at about the speed of fp32 and with a GPU's
numerics; on a GPU it does what torch.amp does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_data() -> tuple[Tensor, Tensor]:
    """Return 512 images of one bright stroke on noise, and whether it lies or stands."""
    generator = torch.Generator().manual_seed(1)
    images = 0.3 * torch.randn(512, 1, 12, 12, generator=generator)
    labels = torch.randint(0, 2, (512,), generator=generator)
    for i, place in enumerate(torch.randint(0, 12, (512,), generator=generator).tolist()):
        images[i, 0, place if labels[i] else slice(None), slice(None) if labels[i] else place] += 1.0
    return images, labels


def make_model() -> nn.Module:
    """Return a small convolutional network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 2),
    )  # fmt: skip


def train(*, enabled: bool) -> list[float]:
    """Train for four epochs, in fp16 if `enabled` and else in fp32; return the loss of every batch."""
    model = make_model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = hs.GradScaler(DEVICE, enabled=enabled)  # was torch.amp.GradScaler
    images, labels = (t.to(DEVICE) for t in make_data())
    losses = []
    for _ in range(4):
        for x, y in zip(images.split(64), labels.split(64), strict=True):
            optimizer.zero_grad(set_to_none=True)
            with hs.autocast(DEVICE, dtype=torch.float16, enabled=enabled):  # was torch.autocast
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
    return losses


def main() -> dict[str, float]:
    """Train in fp16 and in fp32; return the losses of the first and the last batch."""
    half, single = train(enabled=True), train(enabled=False)
    print(f"fp16 {half[0]:.4f} -> {half[-1]:.4f}, fp32 {single[0]:.4f} -> {single[-1]:.4f}")
    return {"first": half[0], "last": half[-1], "first_fp32": single[0], "last_fp32": single[-1]}


if __name__ == "__main__":
    main()
