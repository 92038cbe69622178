"""none: low weights with nothing behind them (2 bytes per parameter), which optimizers step as torch does.

Outside of regions methods and copies of such a `kernels.watched.WatchedParameter` compute in fp32, as those of a store
do; a change by hand is rounded to nearest, with a warning if the low format loses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.formats import LOW_DTYPES
from halfstep.kernels.watched import Owner, owner_of, unwatch, watch
from halfstep.torch_private.autograd import unsafe_preserve_version_counter
from halfstep.weights.every_step import Turn, at_each_step
from halfstep.weights.ranks import training_wrapper

LOST = 0.05  # of the movement that a change by hand makes


class UnkeptWeights(Owner):
    """The low parameters of prepared models under `master="none"`; they keep it alive."""

    _wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], in_region: Callable[[], bool]) -> None:
        super().__init__(in_region)
        self._stepping: set[int] = set()  # optimizers
        for name, parameter in named:
            watch(parameter, self, name, held=True)
            self.names[id(parameter)], self.versions[id(parameter)] = name, parameter._version
        at_each_step(Turn.CHECK, self, _before_step, _after_step)

    def __contains__(self, parameter: object) -> bool:
        """Return whether `parameter` is low, and no optimizer is stepping: it sees low values."""
        return not self._stepping and isinstance(parameter, Tensor) and parameter.dtype in LOW_DTYPES

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Return the low values in fp32."""
        return Tensor.detach(parameter).float()

    @contextmanager
    def writing(self, parameter: nn.Parameter, *, fills: bool, counted: bool) -> Iterator[Tensor]:
        """Give the values of `parameter` in fp32, to be changed, and round them at the end; warn if that loses it."""
        low = Tensor.detach(parameter)
        wide, before = low.float(), low.float()
        self.check(parameter)
        yield wide
        with nullcontext() if counted else unsafe_preserve_version_counter(parameter):
            low.copy_(wide)
        self.versions[id(parameter)] = parameter._version
        if not (fills or self.loading or self.warned):
            if (wide - low).norm() > LOST * (wide - before).norm():
                self._warn_rounded(parameter)

    def replaced(self, parameter: nn.Parameter, name: str, value: Tensor, *, converted: bool) -> Tensor:
        """Return the data of `parameter` where it is set to `value`, rounded unless a cast of it was asked for."""
        if converted or parameter not in self or value.dtype is parameter.dtype or value.shape != parameter.shape:
            return value
        with torch.no_grad(), self.writing(parameter, fills=False, counted=False) as wide:
            wide.copy_(value)
        return Tensor.detach(parameter)

    def check(self, parameter: nn.Parameter) -> None:
        """Warn if low values were written by no method of `parameter`."""
        if self.written_unseen(parameter):
            self.versions[id(parameter)] = parameter._version
            self._warn_rounded(parameter)

    def _warn_rounded(self, parameter: nn.Parameter) -> None:
        kind = str(parameter.dtype).removeprefix("torch.")
        self.warn_once(
            "rounded",
            f"the weight {self.names[id(parameter)]} was changed by hand, and master='none' keeps only its {kind} "
            f"value: what {kind} cannot hold of the change is lost; a policy with master='split' keeps it, or give "
            "its module the rule 'fp32'",
        )

    @staticmethod
    def of(named: Iterable[tuple[Any, nn.Parameter | None]]) -> list[tuple[Any, nn.Parameter, UnkeptWeights]]:
        """Return those of (name, parameter) pairs that are such low ones, with what watches them."""
        owners = [(name, p, owner_of(p)) for name, p in named if p is not None]
        return [(name, p, owner) for name, p, owner in owners if isinstance(owner, UnkeptWeights)]

    @classmethod
    def before_forward(cls, module: nn.Module) -> None:
        """Take note that DistributedDataParallel has sent low values, once for each wrapper of `module` that trains."""
        if (wrapper := training_wrapper(module)) is not None and wrapper not in cls._wrappers:
            cls._wrappers.add(wrapper)
            cls.stepped(module.parameters())

    @staticmethod
    def stepped(parameters: Iterable[nn.Parameter]) -> None:
        """Take note that an update has written those of `parameters` that are such low ones."""
        for _, parameter, owner in UnkeptWeights.of(enumerate(parameters)):
            owner.versions[id(parameter)] = parameter._version

    @staticmethod
    def release(parameters: Iterable[nn.Parameter]) -> None:
        """Give those of `parameters` that are such low ones torch's own class again."""
        for _, parameter, owner in UnkeptWeights.of(enumerate(parameters)):
            unwatch(parameter, owner)


def _before_step(optimizer: Optimizer) -> None:  # optimizers of any kind write low values, without a word
    for _, parameter, owner in UnkeptWeights.of(enumerate(_stepped(optimizer))):
        owner.check(parameter)
        owner._stepping.add(id(optimizer))


def _after_step(optimizer: Optimizer) -> None:
    for _, parameter, owner in UnkeptWeights.of(enumerate(_stepped(optimizer))):
        owner.versions[id(parameter)] = parameter._version
        owner._stepping.discard(id(optimizer))


def _stepped(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
