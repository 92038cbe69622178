"""What the two tasks on images share: a fixed split, an order for each epoch, and the accuracy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfstep.tasks.task import TaskError

__all__ = ["Split", "accuracy_on", "batch_rows", "missing_package", "split_images"]

BATCH = 64
SPLIT_SEED = 5  # the same images in every run
STEPS_OF_A_SEED = 1_000_003  # a prime larger than any run, so that no two (seed, step) share a random state


class Split(NamedTuple):
    """Images and labels to train on, and to test on."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def split_images(images: Tensor, labels: Tensor, train: int) -> Split:
    """Return a fixed random split, `train` images of it for training."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    images, labels = images[order], labels[order]
    return Split(images[:train], labels[:train], images[train:], labels[train:])


def batch_rows(seed: int, step: int, count: int) -> Tensor:
    """Return the rows of batch `step` among `count` images: every epoch a new order of `seed` and the epoch."""
    epoch, place = divmod(step, count // BATCH)
    generator = torch.Generator().manual_seed(STEPS_OF_A_SEED * seed + epoch)
    return torch.randperm(count, generator=generator)[place * BATCH : (place + 1) * BATCH]


def accuracy_on(split: Callable[[], Split]) -> Callable[[nn.Module], float]:
    """Return a metric: the percentage of the test images that a model gets right."""

    def accuracy(model: nn.Module) -> float:
        device = next(model.parameters()).device
        found = model(split().test_images.to(device)).argmax(-1).cpu()
        return 100.0 * float((found == split().test_labels).double().mean())

    return accuracy


def missing_package(task: str, what: str, package: str) -> TaskError:
    """Return the error for a task whose data is in a package that is not installed."""
    return TaskError(
        f"task {task!r} trains on the {what} in the package {package}, which is not installed; "
        "pip install 'halfstep[tasks]', or take --task gpt, which needs nothing"
    )
