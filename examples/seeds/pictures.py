"""What the documents leave out of their loops: a model, data and a loss; the programs beside this file share them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

device = "cuda" if torch.cuda.is_available() else "cpu"
loss_fn = nn.MSELoss()
epochs = range(12)


class Net(nn.Sequential):
    """A small convolutional network for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 1),
        )  # fmt: skip


def make_data(batches: int = 10) -> list[tuple[Tensor, Tensor]]:
    """Seed torch's generator; return batches of noise and, for each image, the difference of its halves."""
    torch.manual_seed(0)
    images = torch.randn(batches, 32, 1, 8, 8)
    targets = images[..., :4].mean((2, 3, 4)) - images[..., 4:].mean((2, 3, 4))
    return [(x.to(device), 4 * y[:, None].to(device)) for x, y in zip(images, targets, strict=True)]


def error(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss of a model in fp32."""
    with torch.no_grad():
        return sum(float(loss_fn(model(x), y)) for x, y in data) / len(data)
