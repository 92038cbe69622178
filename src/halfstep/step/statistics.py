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

    def __init__(self, model: nn.Module) -> None:
        self._models: dict[int, nn.Module] = {}  # held, so that no address comes twice
        self._norms: dict[_NormBase, None] = {}
        self.kept: list[tuple[list[Tensor], Tensor]] = []  # buffers of one kind, and their values in one tensor
        self.visit(model)

    @property
    def models(self) -> Iterable[nn.Module]:
        """The models it looks after."""
        return self._models.values()

    def visit(self, model: nn.Module) -> None:
        """Look after the statistics of `model` from now on: the step's own, or another one that its loss calls."""
        if id(model) in self._models:
            return
        self._models[id(model)] = model
        found = {m: None for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None}
        new = [norm for norm in found if norm not in self._norms]
        self._norms.update(found)
        self.kept += _values(new)

    def keep(self) -> None:
        """Remember the statistics of the norms that are in training mode."""
        self.kept = _values(self._norms)

    def put_back(self, bad: Tensor) -> None:
        """Restore what `keep` saw where `bad`, a 0-dim bool, is true; waits for nothing."""
        for buffers, kept in self.kept:
            values = torch.where(bad.to(kept.device), kept, _joined(buffers))
            torch._foreach_copy_(buffers, _parted(values, buffers))
        self.kept = []

    def restore(self) -> None:
        """Restore what `keep` saw."""
        for buffers, kept in self.kept:
            torch._foreach_copy_(buffers, _parted(kept, buffers))


def _values(norms: Iterable[_NormBase]) -> list[tuple[list[Tensor], Tensor]]:
    """Return the buffers of norms in training mode, by kind, and a copy of each kind as one tensor."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
    for norm in norms:
        if norm.training:
            for name in BUFFERS:
                buffer = norm._buffers.get(name)
                if buffer is not None:
                    kinds.setdefault((buffer.dtype, buffer.device, bool(buffer.dim())), []).append(buffer)
    return [(buffers, _joined(buffers)) for buffers in kinds.values()]


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat(buffers) if buffers[0].dim() else torch.stack(buffers)


def _parted(values: Tensor, buffers: list[Tensor]) -> tuple[Tensor, ...]:
    return values.split([len(b) for b in buffers]) if buffers[0].dim() else values.unbind()
