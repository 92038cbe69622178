"""Optimizer states on the host: the device has them while an update runs, and at no other time.

Note [one stream]: copies run on the current stream, behind the backward pass and the update, and the host waits for
none of them. A stream of their own would let the next forward pass begin before the states have left, but then the
allocator could not give their memory to it: what another stream still reads is free only when the device is done.

Note [reads]: a copy to the host is complete when a flag has landed that was sent after it, as the verdict of the same
update is; `state_dict`, and a copy of the step, wait for the device.
"""

import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.accelerators import copies_behind_events
from halfstep.errors import StepError
from halfstep.kernels.choose import KERNEL_TYPES
from halfstep.kernels.sharded import local
from halfstep.optim import members
from halfstep.step.part import Part
from halfstep.update.updater import Updater
from halfstep.weights.states import LowStates

Place = tuple[LowStates | None, Tensor, dict[Any, Any], Any, Tensor]


class HostState(Part):
    """Keeps the states of parameters that are on an accelerator on the host between updates.

    States are tensors of more than one element, plain or sharded: of these each rank moves its part. Step counts stay
    where the optimizer keeps them, and so does what is nested or of a class of its own. On a CPU nothing moves.
    `whole`: all parameters are updated together; else whoever updates some calls `bring` before and `send` after it.
    """

    def __init__(self, updater: Updater, *, whole: bool) -> None:
        for optimizer in members(updater.optimizer):
            if isinstance(getattr(optimizer, "optim", None), Optimizer):  # ZeroRedundancyOptimizer
                raise StepError(
                    f"state='host': {type(optimizer).__name__} steps through another optimizer, which has the states; "
                    "leave state out, or give an optimizer that has its own"
                )
        self._updater, self._whole = updater, whole
        self._homes: dict[tuple[int, Any], tuple[dict[Any, Any], Tensor]] = {}  # of the states that are on the device
        self._made: MutableMapping[Tensor, None] = WeakIdKeyDictionary()  # homes, pinned where that helps
        self._waiting = weakref.WeakSet[Optimizer]()  # their state_dict waits for the device

    def begin_window(self) -> None:
        """Send what is on the device for another reason than an update: it was loaded, or made by hand."""
        self.send()

    def before_update(self) -> None:
        """Have all states on the device."""
        if self._whole:
            self.bring()

    def after_update(self, bad: Tensor) -> None:
        """Copy them back, also where the update was skipped."""
        self.send()

    def abort(self, *, written: bool) -> None:
        """Drop what is on the device, unless the update has `written` it."""
        for (_, name), (state, home) in () if written else self._homes.items():
            state[name] = home
        self._homes.clear()
        self._updater.forget_tables()

    @torch.no_grad()
    def bring(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Copy the states, or those of some parameters, to the devices of these; waits for nothing."""
        for low, parameter, state, name, value in self._places(parameters):
            if value.device.type == "cpu":
                self._homes[id(state), name] = state, value
                there = value.to(parameter.device, non_blocking=copies_behind_events(parameter.device.type))
                _put(low, state, name, value, there)

    @torch.no_grad()
    def send(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Copy the states that are on a device, or those of some parameters, to the host; waits for nothing."""
        sent = False
        for low, _, state, name, value in self._places(parameters):
            if value.device.type == "cpu":
                continue
            sent, quick = True, copies_behind_events(value.device.type)
            _, home = self._homes.get((id(state), name), (None, None))
            if home is None or home not in self._made or not _fits(home, value):
                home = torch.empty_like(value, device="cpu", pin_memory=quick)
                self._made[home] = None
            local(home).copy_(local(value), non_blocking=quick)
            _put(low, state, name, value, home)
        self._homes.clear()
        if sent:
            self._updater.forget_tables()  # they hold the tensors on the device
            for optimizer in set(members(self._updater.optimizer)) - set(self._waiting):
                optimizer.register_state_dict_pre_hook(wait_for)
                self._waiting.add(optimizer)

    def _places(self, parameters: Iterable[Tensor] | None = None) -> Iterator[Place]:
        """Yield (low states, parameter, its state, name, value) of each state that is to be on the host."""
        for optimizer in members(self._updater.optimizer):
            low = LowStates.of(optimizer)
            for parameter in optimizer.state if parameters is None else parameters:
                state = optimizer.state.get(parameter)
                if not isinstance(parameter, Tensor) or not isinstance(state, dict) or parameter.device.type == "cpu":
                    continue
                for name, value in [*state.items()]:
                    if type(local(value)) in KERNEL_TYPES and value.numel() > 1 and value.layout is torch.strided:
                        yield low, parameter, state, name, value


def _put(low: LowStates | None, state: dict[Any, Any], name: Any, value: Tensor, copied: Tensor) -> None:
    if low is not None:
        low.copied(value, copied)
    state[name] = copied


def _fits(home: Tensor, value: Tensor) -> bool:
    return home.dtype is value.dtype and home.shape == value.shape and home.stride() == value.stride()


def wait_for(optimizer: Optimizer) -> None:
    """Wait until the states of `optimizer` are on the host: note [reads]."""
    for device in {p.device for group in optimizer.param_groups for p in group["params"]}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
