"""resnet: a residual network with BatchNorm on the 1,797 handwritten digits that ship in scikit-learn.

Blocks are He et al., "Identity Mappings in Deep Residual Networks" (2016) without bottleneck, at the size 8x8 images
need. BatchNorm's running statistics are what a bad step spoils for good, so they belong into a comparison.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from halfstep.tasks.images import (
    BATCH,
    STEPS_OF_A_SEED,
    Split,
    accuracy_on,
    batch_rows,
    missing_package,
    split_images,
)
from halfstep.tasks.task import Task

__all__ = ["ResNet", "resnet_task"]

TRAIN = 1280  # images to train on, 20 batches; the other 517 are the test set
LARGEST = 16.0  # pixels are counts from 0 to 16
WIDTHS = (16, 32, 64)
PEAK_RATE = 0.1


class Block(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x)))))), halving the image and widening it where `stride` is 2."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, width, H, W) to (B, out, H / stride, W / stride)."""
        y = self.conv1(F.relu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.relu(self.norm2(y)))  # type: ignore[no-any-return]  # modules give Any


class ResNet(nn.Module):
    """A residual network for (B, 1, 8, 8) images: three blocks of 16, 32 and 64 channels, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTHS[0], 3, 1, 1, bias=False)
        narrow, middle, wide = WIDTHS
        self.blocks = nn.Sequential(Block(narrow, narrow, 1), Block(narrow, middle, 2), Block(middle, wide, 2))
        self.norm = nn.BatchNorm2d(WIDTHS[-1])
        self.head = nn.Linear(WIDTHS[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 1, 8, 8) to class scores (B, 10)."""
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


@cache
def split() -> Split:
    """Return training images (1280, 1, 8, 8) and labels, test images (517, 1, 8, 8) and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise missing_package("resnet", "digits", "scikit-learn") from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div_(LARGEST).sub_(0.5).mul_(2.0)[:, None]
    return split_images(images, torch.from_numpy(digits.target).long(), TRAIN)


def batches(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return batch `step` of a run, each image moved by at most a pixel; only `seed` and `step` decide."""
    rows = batch_rows(seed, step, TRAIN)
    generator = torch.Generator().manual_seed(STEPS_OF_A_SEED * seed + step)
    down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
    moved = F.pad(split().images[rows], (1, 1, 1, 1), value=-1.0)[:, :, down : down + 8, right : right + 8]
    return moved, split().labels[rows]


def loss_fn(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch, labels smoothed by a tenth."""
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def optimizer(model: nn.Module) -> Optimizer:
    """Return SGD with Nesterov momentum over the parameters of `model`."""
    return SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)


def scheduler(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return one cycle: up to the peak in a quarter of the run, down to almost nothing at its end."""
    return OneCycleLR(optimizer, max_lr=PEAK_RATE, total_steps=steps + 1, pct_start=0.25, cycle_momentum=False)


def resnet_task() -> Task:
    """Return the task `resnet`."""
    split()
    return Task(
        name="resnet", model=ResNet, batches=batches, loss_fn=loss_fn, optimizer=optimizer, scheduler=scheduler,
        metric=accuracy_on(split), metric_name="accuracy, %", higher_is_better=True, margin=1.5, steps=400,
        excerpt_steps=100, clip_norm=1.0,
        about=f"pre-activation ResNet with BatchNorm, 77,562 parameters, {TRAIN} scikit-learn digits of 8x8, "
        f"batch {BATCH}; tested on 517 others",
    )  # fmt: skip
