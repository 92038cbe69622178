"""Manual changes of low weights: writes into them, replaced data, values beyond their range.

Note [changes by hand]: `nn.init`, ``parameter.copy_`` and an embedding's max_norm write into low weights, which torch
counts in their `_version`; every read of a master first takes the written values over. Writes through ``.data`` are
counted by the class of the parameter (`kernels.watched`): masters take them over too, with one warning, because the
part of an update that the low format cannot represent is lost. Writes by torch.distributed and by kernels are not
counted. All of these changes belong inside `hs.edit_weights`.

Note [averages by hand]: reading ``parameter.data`` leaves no trace. But an average is kept in a copy of the model, and
such loops write into the copy through ``.data``. Its parameters are watched; there is one warning at the second write
unless fp32 values were shown meanwhile (`edit_weights`, `state_dict`). An average that reads and writes parameters
under `torch.no_grad` without ``.data`` looks like any other use of a copy, and is not noticed.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.optim import Optimizer

from halfstep.errors import WeightsError

__all__ = ["ManualChanges", "beyond"]


class ManualChanges(ABC):
    """The part of a weight store that handles manual changes.

    Attributes:
        dtype: the low format.
        exposed: how often fp32 values were shown: copies may have been averaged with them since.
    """

    dtype: torch.dtype
    exposed: int
    _names: dict[int, str]
    _parameters: dict[int, nn.Parameter]
    _versions: dict[int, int]
    _fresh: set[int]
    _without_low: weakref.WeakKeyDictionary[Optimizer, int]
    _warned: set[bool]  # what was warned of, once: a copy or not

    @abstractmethod
    def _adopt(self, key: int, parameter: nn.Parameter) -> Tensor:
        """Keep the fp32 values of `parameter` under `key` and return the low ones."""

    @abstractmethod
    def _read_low(self, key: int) -> None:
        """Take over the values that were written into the low weight of `key`."""

    @abstractmethod
    def _forget(self, key: int) -> None:
        """Drop what is kept under `key`."""

    @abstractmethod
    def _move(self, key: int, like: Tensor) -> None:
        """Move what is kept under `key` to the device and into the memory layout of `like`."""

    @abstractmethod
    def __contains__(self, parameter: object) -> bool:
        """Return whether `parameter` is a low parameter of this store."""

    @abstractmethod
    def _key(self, parameter: nn.Parameter) -> int:
        """Return the key of `parameter` after what was written into it by hand has been taken over."""

    @abstractmethod
    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 master of `parameter`."""

    @abstractmethod
    def read(self, parameter: nn.Parameter) -> Tensor:
        """Return the fp32 value of `parameter` as a new tensor."""

    @property
    def _kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    # ------------------------------------------------------------------ data

    def data_written(self, name: str, *, copied: bool) -> None:
        """Warn, once, of writes through ``.data`` into low weights, or into a copy that saw no fp32 values since."""
        if not copied:
            text = (
                f"the low weight {name} was written through .data: what {self._kind} cannot hold of that is lost, its "
                "fp32 value lies elsewhere; change weights inside `with hs.edit_weights(model):`, where they are fp32"
            )
        elif not self.exposed:
            text = (
                f"a copy of the model is changed through .data ({name}), as averages of weights are, and the weights "
                f"of the model are {self._kind}: their fp32 values are to be had inside `with hs.edit_weights(model):`"
            )
        else:
            return
        if copied not in self._warned:
            self._warned.add(copied)
            warnings.warn(text, stacklevel=3)

    @torch.no_grad()
    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        """Return the data that `parameter` gets where it is given `value`, as ``module.float()`` or ``.to`` do.

        In fp32 or a wider format it is its precise value, which an optimizer steps as any other from then on; back in
        the low format it is adopted again. On another device or in another layout, what is kept beside it follows.

        Raises:
            WeightsError: another low format, none of floating point numbers, or another shape than the fp32 value
                behind it; nothing was changed.
        """
        now, low = parameter.detach(), value.to(self.dtype)
        if parameter in self and value.shape != now.shape:
            raise WeightsError(
                f"parameter {name} has shape {tuple(now.shape)}, as its fp32 value and its optimizer's state have, and "
                f"was given data of shape {tuple(value.shape)}; hs.unprepare(model), resize it, build the "
                "optimizer anew, then hs.prepare"
            )
        if parameter not in self:
            if value.dtype is not self.dtype:
                return value
            same = value.shape == now.shape and value.device == now.device and bool((now.to(low) == low).all())
            precise = nn.Parameter(now.float() if same else value.float(), requires_grad=parameter.requires_grad)
            low = self._adopt(id(parameter), precise)
            self._add(name, parameter)
            return low
        if value.dtype is self.dtype:
            if value.data_ptr() != now.data_ptr() or value.stride() != now.stride() or value.device != now.device:
                key = self._key(parameter)
                if not torch.equal(value, now.to(value.device)):
                    parameter.note()  # type: ignore[attr-defined]  # only watched parameters come here
                else:
                    self._move(key, value)
            return value
        if value.dtype not in {torch.float32, torch.float64}:
            raise WeightsError(
                f"parameter {name} is held in {self._kind}, with its fp32 value behind it, and was to become "
                f"{value.dtype}; hs.unprepare(model) before its format is changed"
            )
        wide = self.read(parameter).to(value)
        self._remove(parameter)
        return torch.where(now.to(value) == value, wide, value)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        self._without_low.clear()
        key = id(parameter)
        self._names[key], self._parameters[key], self._versions[key] = name, parameter, parameter._version
        self._fresh.add(key)

    def _remove(self, parameter: nn.Parameter) -> None:
        self._forget(id(parameter))
        self._without_low.clear()
        for entries in (self._names, self._parameters, self._versions):
            entries.pop(id(parameter))

    # ------------------------------------------------------------------ values beyond the range

    def refuse(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Refuse finite values for `parameter` that its low format cannot hold; waits for their device.

        Raises:
            WeightsError: there are some; nothing was changed.
        """
        if lost := beyond(self._names[id(parameter)], value, self.dtype):
            raise WeightsError(f"{lost}; clamp it, or prepare the model with dtype='bf16' or its module in fp32")

    @torch.no_grad()
    def undo_beyond(self, parameters: Iterable[nn.Parameter]) -> str:
        """Reset masters with values beyond the low format to their low weights; return the first, "" for none."""
        lost = ""
        for parameter in parameters:
            if found := beyond(self._names[id(parameter)], self.master(parameter), self.dtype):
                self._read_low(id(parameter))
                lost = lost or found
        return lost


def beyond(name: str, values: Tensor, low: torch.dtype) -> str:
    """Return a message if one of `values`, the weights called `name`, is finite and becomes infinite in `low`; else "".

    Waits for the device of `values`.
    """
    values = values.detach()
    if values.is_meta or is_fake(values):
        return ""
    lost = torch.isfinite(values) & torch.isinf(values.to(low))
    if not bool(lost.any()):
        return ""
    worst = values[lost].abs().max().item()
    kind = str(low).removeprefix("torch.")
    return f"parameter {name} holds a weight of magnitude {worst:.8g}, and {kind} ends at {torch.finfo(low).max:.8g}"
