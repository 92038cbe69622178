"""What CUDA graphs of a training step depend on: facts that must not change, and learning rates, which may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.binding.prepare import unwrap

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

__all__ = ["Rates", "facts_of"]


def facts_of(step: TrainStep) -> dict[str, Any]:
    """Return what all graphs of `step` depend on, by its name in messages; waits for nothing."""
    groups = step.optimizer.param_groups
    model = unwrap(step.model)
    return {
        "a hyperparameter in param_groups": [
            [(k, id(v) if isinstance(v, Tensor) else v) for k, v in group.items() if k not in {"params", "lr"}]
            for group in groups
        ],
        "a learning rate that is a tensor": [id(g["lr"]) if _on_device(g["lr"]) else None for g in groups],
        "the place of a parameter or buffer": [t.data_ptr() for t in (*model.parameters(), *model.buffers())],
        "clipping or the scaler": (step.clip_norm, step.clip_value, step.accumulate, step.scaler.rule),
        "the optimizer's state": _Same(step.optimizer.state),
    }


class _Same:
    """An object that is equal to itself only, and kept alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _on_device(rate: object) -> bool:
    return isinstance(rate, Tensor) and rate.device.type != "cpu"


class Rates:
    """Learning rates as fp32 tensors on the device in warm-ups and captures; otherwise they are the user's numbers.

    A rate that is a tensor on the device already stays as it is: changing it in place changes what graphs read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[Tensor | None] = []  # of each group
        self._filled: list[float | None] = []

    @contextmanager
    def as_tensors(self, optimizer: Optimizer) -> Iterator[None]:
        """Replace the rates of `optimizer` by tensors that `fill` has filled, and mark it capturable."""
        groups = optimizer.param_groups
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=True):
            if tensor is not None:
                group["lr"] = tensor
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable

    def fill(self, optimizer: Optimizer) -> None:
        """Write the rates that have changed into the tensors that graphs read; waits for nothing."""
        if not self._tensors:
            self._tensors = [
                None if _on_device(group["lr"]) else torch.zeros((), dtype=torch.float32, device=self._device)
                for group in optimizer.param_groups
            ]
            self._filled = [None] * len(self._tensors)
        for i, (group, tensor) in enumerate(zip(optimizer.param_groups, self._tensors, strict=True)):
            if tensor is not None and (now := float(group["lr"])) != self._filled[i]:
                tensor.fill_(now)
                self._filled[i] = now
