"""Parameters that notice writes through ``.data``, which no version counter of torch counts.

A weight store needs to notice them: a write into a low weight does not change its fp32 value, and a module that is
moved to another format or device gives its parameters other data. The class of such a parameter becomes a subclass
whose ``data`` aliases share one version counter, and which calls its owner (a store) when the data is replaced.

`AveragedModel` of torch reads the parameters of a model by ``detach()``: there it is given the precise values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from sys import _getframe
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.optim.swa_utils import AveragedModel

__all__ = ["Owner", "WatchedParameter", "is_copy", "unwatch", "unwatch_copies", "watch"]

NOTES = "_halfstep_notes"
MAKING = nn.Parameter.__new__.__code__
AVERAGING = AveragedModel.update_parameters.__code__
_get: Callable[[Tensor], Tensor] = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor of C
_set: Callable[[Tensor, Tensor], None] = Tensor.data.__set__  # type: ignore[attr-defined]


class Owner(Protocol):
    """What is called about a parameter."""

    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        """Return what becomes the data of `parameter` where a user sets it to `value`."""

    def data_written(self, name: str, *, copied: bool) -> None:
        """Note that a parameter, or a copy of it, was written through ``.data``, which is read again now."""

    def data_read(self) -> None:
        """Note that the ``.data`` of a parameter was given out: writes into it may follow."""

    def copied(self, copy: nn.Parameter, memo: dict[Any, Any]) -> None:
        """Note that a parameter was copied, by the ``copy.deepcopy`` with this `memo`."""

    def averaged(self, parameter: nn.Parameter) -> Tensor:
        """Return the precise value of `parameter`, to be averaged."""


class _Notes:
    """What is known of one parameter.

    Attributes:
        owner: what is called.
        name: dotted name in the model.
        copied: whether this is a copy of the owner's parameter.
        alias: what every ``.data`` is an alias of, or None: its version counts writes.
        seen: that version when it was last read.
        replaced: whether the data was replaced since.
    """

    __slots__ = ("alias", "copied", "name", "owner", "replaced", "seen")

    def __init__(self, owner: weakref.ref[Owner], name: str, *, copied: bool) -> None:
        self.owner, self.name, self.copied = owner, name, copied
        self.alias: Tensor | None = None
        self.seen, self.replaced = 0, False


class WatchedParameter(nn.Parameter):
    """A parameter that takes note of writes through its ``data``."""

    @property
    def data(self) -> Tensor:
        """Return an alias of the values that autograd does not see; writes into it are noticed."""
        if is_dynamo_compiling():  # as it is traced for other parameters; writes into it count in `_version`
            return self.detach()
        notes = self.__dict__.get(NOTES)
        if notes is None or torch.is_inference_mode_enabled():
            return _get(self)
        if notes.alias is None:
            notes.alias, notes.seen = _get(self), 0
            if (owner := notes.owner()) is not None:
                owner.data_read()
        elif notes.alias._version != notes.seen and (owner := notes.owner()) is not None:
            owner.data_written(notes.name, copied=notes.copied)
        alias: Tensor = notes.alias.detach()
        return alias  # a new tensor each time, as torch gives; all share one version counter

    @data.setter
    def data(self, value: Tensor) -> None:
        notes = self.__dict__.get(NOTES)
        if notes is not None:
            owner = notes.owner()
            # in ``p.data += x`` the alias is written, and then given back as the data
            written = notes.alias is not None and notes.alias._version != notes.seen
            if written and owner is not None:
                owner.data_written(notes.name, copied=notes.copied)
            if not notes.copied and owner is not None:
                notes.replaced = notes.replaced or written
                value = owner.replaced(self, notes.name, value)
            elif notes.copied and owner is not None and not written and self._is_other(value):
                if notes.replaced:
                    owner.data_written(notes.name, copied=True)
                notes.replaced = True
            notes.alias, notes.seen = None, 0
        _set(self, value)

    def _is_other(self, value: Tensor) -> bool:
        """Return whether `value` is new data, and not the present data in another format or on another device."""
        same = value.dtype is self.dtype and value.device == self.device and value.shape == self.shape
        return same and value.data_ptr() != self.data_ptr()

    def written(self) -> bool:
        """Return whether values were written through ``data`` since this was last called."""
        notes = self.__dict__.get(NOTES)
        if notes is None or (notes.alias is None and not notes.replaced):
            return False
        version = 0 if notes.alias is None else notes.alias._version
        found: bool = notes.replaced or version != notes.seen
        notes.replaced, notes.seen = False, version
        return found

    def note(self) -> None:
        """Take note that the values were replaced."""
        self.__dict__[NOTES].replaced = True

    def detach(self) -> Tensor:
        """Return an alias that autograd does not see: a plain tensor, but for two callers.

        `nn.Parameter`, when it makes another, requires the class of its argument, sets `_is_param`, and so gets a plain
        parameter. `AveragedModel` gets the precise value.
        """
        alias: Tensor = Tensor.detach(self)
        if not is_dynamo_compiling():
            caller = _getframe(1).f_code
            if caller is MAKING:
                alias = alias.as_subclass(WatchedParameter)
            elif caller is AVERAGING and (notes := self.__dict__.get(NOTES)) is not None and not notes.copied:
                if (owner := notes.owner()) is not None:
                    alias = owner.averaged(self)
        return alias

    @property
    def _is_param(self) -> bool:
        return True

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            found: nn.Parameter = memo[id(self)]
            return found
        made = nn.Parameter(_get(self).clone(memory_format=torch.preserve_format), self.requires_grad)
        notes = self.__dict__.get(NOTES)
        if notes is not None and (owner := notes.owner()) is not None:
            watch(made, owner, notes.name, copied=True)
            owner.copied(made, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(_get(self), self.requires_grad)
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name != NOTES})
        return plain.__reduce_ex__(protocol)


def watch(parameter: nn.Parameter, owner: Owner, name: str, *, copied: bool = False) -> None:
    """Watch `parameter` for `owner`, if it is of torch's own class."""
    if type(parameter) in {nn.Parameter, WatchedParameter}:
        parameter.__class__ = WatchedParameter
        parameter.__dict__[NOTES] = _Notes(weakref.ref(owner), name, copied=copied)


def unwatch(parameter: nn.Parameter, owner: Owner) -> None:
    """Make `parameter` a plain one again if it is watched for `owner`, or for one that is gone."""
    if type(parameter) is WatchedParameter and parameter.__dict__[NOTES].owner() in {owner, None}:
        vars(parameter).pop(NOTES, None)
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def is_copy(parameter: nn.Parameter, owner: Owner) -> bool:
    """Return whether `parameter` is watched as a copy of one of `owner`."""
    notes = vars(parameter).get(NOTES)
    return notes is not None and notes.copied and notes.owner() is owner


def unwatch_copies(parameters: Iterable[nn.Parameter]) -> None:
    """Make copies of watched parameters plain ones: they are trained from now on, and are no averages."""
    for parameter in parameters:
        if type(parameter) is WatchedParameter and (notes := vars(parameter).get(NOTES)) is not None and notes.copied:
            del vars(parameter)[NOTES]
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
