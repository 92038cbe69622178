"""BatchNorm's statistics through a bad step: the forward pass has changed them before the verdict is known."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["Statistics"]

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Statistics:
    """Keeps the running statistics of a model's norms and puts them back if a verdict on the device says so.

    Many small buffers are copied in one call for each format, into memory that stays: a handful of launches whatever
    the number of norms, and nothing is allocated. (One clone, one select and one copy a buffer were 3 % of a step of a
    residual network with nine norms; joining them into new tensors before and after took as long.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._models: dict[int, nn.Module] = {}  # held, so that no address comes twice
        self._norms: dict[_NormBase, None] = {}
        self._found: list[Tensor] = []  # buffers of the norms that were in training mode in the last window
        self._memory: list[tuple[list[Tensor], Tensor]] = []  # these by kind, and the memory each kind is kept in
        self.kept: list[tuple[list[Tensor], Tensor]] = []  # what a verdict may put back
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
        self.kept = [*self.kept, *_values(_buffers(new))]

    def keep(self) -> None:
        """Remember the statistics of the norms that are in training mode."""
        found = _buffers(self._norms)
        if len(found) != len(self._found) or any(new is not old for new, old in zip(found, self._found, strict=True)):
            self._memory, self._found = _values(found), found
        else:
            for buffers, memory in self._memory:
                _joined(buffers, out=memory)
        self.kept = self._memory

    def put_back(self, bad: Tensor) -> None:
        """Restore what `keep` saw where `bad`, a 0-dim bool, is true; waits for nothing."""
        kept, self.kept = self.kept, []
        if kept and not _good_on_cpu(bad):
            for buffers, memory in kept:
                values = torch.where(bad.to(memory.device), memory, _joined(buffers))
                torch._foreach_copy_(buffers, _parted(values, buffers))

    def restore(self) -> None:
        """Restore what `keep` saw."""
        for buffers, memory in self.kept:
            torch._foreach_copy_(buffers, _parted(memory, buffers))


def _good_on_cpu(bad: Tensor) -> bool:
    """Return whether `bad` is false and in the host's memory, where looking at it is no operator and no wait."""
    if type(bad) is not Tensor or bad.device.type != "cpu":
        return False
    return not ctypes.c_bool.from_address(bad.data_ptr()).value


def _buffers(norms: Iterable[_NormBase]) -> list[Tensor]:
    """Return the buffers of the norms that are in training mode."""
    found = [norm._buffers.get(name) for norm in norms if norm.training for name in BUFFERS]
    return [buffer for buffer in found if buffer is not None]


def _values(buffers: list[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Return buffers by kind, and the values of each kind as one tensor."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device, bool(buffer.dim())), []).append(buffer)
    return [(alike, _joined(alike)) for alike in kinds.values()]


def _joined(buffers: list[Tensor], out: Tensor | None = None) -> Tensor:
    return torch.cat(buffers, out=out) if buffers[0].dim() else torch.stack(buffers, out=out)


def _parted(values: Tensor, buffers: list[Tensor]) -> tuple[Tensor, ...]:
    return values.split([len(b) for b in buffers]) if buffers[0].dim() else values.unbind()
