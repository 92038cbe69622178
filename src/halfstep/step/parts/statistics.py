"""BatchNorm's statistics through a bad step: the forward pass has changed them before the verdict is known.

The device decides whether they are restored, by the flag that it computes, and nothing waits.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from halfstep.kernels.native.calls import peek
from halfstep.step.part import Part
from halfstep.torch_private.foreach import foreach_copy_
from halfstep.torch_private.modules import NormBase

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class _Kind:
    """Buffers of one device, format and number of dimensions, and the memory their values are kept in."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.memory = _joined(buffers)
        self.kept = _parted(self.memory, buffers)

    def keep(self) -> None:
        if self.kept[0].dim():
            torch.cat(self.buffers, out=self.memory)
        else:
            foreach_copy_(self.kept, self.buffers)

    def restore_where(self, bad: Tensor) -> None:
        values = torch.where(bad.to(self.memory.device), self.memory, _joined(self.buffers))
        foreach_copy_(self.buffers, _parted(values, self.buffers))

    def restore(self) -> None:
        foreach_copy_(self.buffers, self.kept)


class Statistics(Part):
    """Keeps the running statistics of a model's norms, and restores them where a verdict on the device is bad.

    Buffers of one format are copied in one call, into memory that stays: a call each was 3 % of a step of a residual
    network with nine norms.
    """

    def __init__(self, model: nn.Module, join: Callable[[object], None] | None = None) -> None:
        self.models: dict[int, weakref.ref[nn.Module]] = {}  # by id, until it ends: no address comes twice
        self._norms = weakref.WeakKeyDictionary[NormBase, None]()
        self._kinds: list[_Kind] = []  # of the norms that were in training mode in the last window
        self._found: list[Tensor] = []  # their buffers
        self._join = join
        self.open: list[_Kind] = []  # the buffers that a verdict, or `abort`, may still restore
        self.add(model)

    def add(self, model: nn.Module) -> None:
        """Look after the statistics of `model` too: the loss function calls it."""
        if id(model) in self.models:
            return
        found = {m: None for m in model.modules() if isinstance(m, NormBase) and m.running_mean is not None}
        new = [norm for norm in found if norm not in self._norms]
        models, key = self.models, id(model)
        self.open = [*self.open, *map(_Kind, _by_kind(_buffers(new)))]
        self._norms.update(found)
        if self._norms and self._join is not None:
            self._join(self)
            self._join = None
        models[key] = weakref.ref(model, lambda _: models.pop(key, None))  # last: if this is cut off, it is done again

    def begin_window(self) -> None:
        """Copy the statistics of the norms that are in training mode."""
        if not self._norms and not self._found:
            return
        found = _buffers(self._norms)
        if len(found) != len(self._found) or any(new is not old for new, old in zip(found, self._found, strict=True)):
            self._kinds, self._found = [*map(_Kind, _by_kind(found))], found
        with torch.no_grad():
            for kind in self._kinds:
                kind.keep()
        self.open = self._kinds  # last: `abort` restores what is complete

    def kept(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return (norm, name, value) of the last copies; the values are overwritten by the next window."""
        values = {id(b): v for kind in self._kinds for b, v in zip(kind.buffers, kind.kept, strict=True)}
        return [
            (norm, name, values[id(buffer)])
            for norm in self._norms
            for name, buffer in norm._buffers.items()
            if buffer is not None and id(buffer) in values
        ]

    def after_update(self, bad: Tensor) -> None:
        """Restore the copies where `bad`, a 0-dim bool, is true; waits for nothing."""
        kinds, self.open = self.open, []
        if type(bad) is not Tensor or bad.device.type != "cpu" or peek(bad):
            for kind in kinds:
                kind.restore_where(bad)

    def abort(self, *, written: bool) -> None:
        """Restore the copies; nothing if making them was cut off, or a verdict has come since."""
        if written:
            return
        with torch.no_grad():
            for kind in self.open:
                kind.restore()
        self.open = []


def _buffers(norms: Iterable[NormBase]) -> list[Tensor]:
    """Return the buffers of the norms that are in training mode."""
    found = [norm._buffers.get(name) for norm in norms if norm.training for name in BUFFERS]
    return [buffer for buffer in found if buffer is not None]


def _by_kind(buffers: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device, bool(buffer.dim())), []).append(buffer)
    return list(kinds.values())


def _joined(buffers: list[Tensor]) -> Tensor:
    return torch.cat(buffers) if buffers[0].dim() else torch.stack(buffers)


def _parted(values: Tensor, buffers: list[Tensor]) -> tuple[Tensor, ...]:
    return values.split([len(b) for b in buffers]) if buffers[0].dim() else values.unbind()
