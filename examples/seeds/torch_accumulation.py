"""Accumulation: step and update once for several batches.

Source: the blog post "Some things to know about mixed precision (amp)" (in Chinese), part "gradient accumulation".
Changed: torch.cuda.amp in the import into ``halfstep.compat.torch_amp.cuda``. Without CUDA: emulated fp16.
"""
# ruff: noqa: B007 - the document's own lines
# mypy: ignore-errors
# fmt: off

import torch
from torch import nn

from halfstep.compat.torch_amp.cuda import GradScaler, autocast

# ---- what the document leaves out: a model, data, numbers

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Sequential):
    """A small convolutional network for images of 8 by 8."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 1),
        )


def make_data(batches=10):
    """Return batches of noise and, for each image, the difference of its halves."""
    images = torch.randn(batches, 32, 1, 8, 8)
    targets = images[..., :4].mean((2, 3, 4)) - images[..., 4:].mean((2, 3, 4))
    return [(x.to(device), 4 * y[:, None].to(device)) for x, y in zip(images, targets, strict=True)]


def error(model):
    """Return the mean loss of a model in fp32."""
    with torch.no_grad():
        return sum(float(loss_fn(model(x), y)) for x, y in data) / len(data)


loss_fn = nn.MSELoss()
data = make_data()
epochs = range(12)
iters_to_accumulate = 2

model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
before = error(model)

# ---- the document's code

scaler = GradScaler()

for epoch in epochs:
    for i, (input, target) in enumerate(data):
        with autocast():
            output = model(input)
            loss = loss_fn(output, target)
            # loss 根据 累加的次数归一一下
            loss = loss / iters_to_accumulate

        # scale 归一的loss 并backward
        scaler.scale(loss).backward()

        if (i + 1) % iters_to_accumulate == 0:
            # may unscale_ here if desired
            # (e.g., to allow clipping unscaled gradients)

            # step() and update() proceed as usual.
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

# ---- what came out

after = error(model)
print(f"loss {before:.4f} -> {after:.4f}, scale {scaler.get_scale():g}")
