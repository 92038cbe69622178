"""BatchNorm's statistics through a bad step: the forward pass has changed them before the verdict is known."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["Statistics"]

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Statistics:
    """Keeps the running statistics of a model's norms and puts them back if a verdict on the device says so.

    Many small buffers are copied as one tensor for each shape and format: a handful of launches whatever the number
    of norms. (One clone, one select and one copy a buffer were 3 % of a step of a residual network with nine norms.)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._norms = [m for m in modules if isinstance(m, _NormBase) and m.running_mean is not None]
        self._kept: list[tuple[list[Tensor], Tensor]] = []  # buffers of one kind, and their values in one tensor

    def keep(self) -> None:
        """Remember the statistics of the norms that are in training mode."""
        kinds: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
        for norm in self._norms:
            if norm.training:
                for name in BUFFERS:
                    buffer = norm._buffers.get(name)
                    if buffer is not None:
                        kinds.setdefault((buffer.dtype, buffer.device, bool(buffer.dim())), []).append(buffer)
        self._kept = [(buffers, _joined(buffers)) for buffers in kinds.values()]

    def put_back(self, bad: Tensor) -> None:
        """Restore what `keep` saw where `bad`, a 0-dim bool, is true; waits for nothing."""
        for buffers, kept in self._kept:
            values = torch.where(bad.to(kept.device), kept, _joined(buffers))
            torch._foreach_copy_(buffers, _parted(values, buffers))
        self._kept = []


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat(buffers) if buffers[0].dim() else torch.stack(buffers)


def _parted(values: Tensor, buffers: list[Tensor]) -> tuple[Tensor, ...]:
    return values.split([len(b) for b in buffers]) if buffers[0].dim() else values.unbind()
