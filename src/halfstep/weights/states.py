"""Optimizer states in bf16, under any torch optimizer: 2 bytes an element where torch keeps 4.

bf16 for every policy, also one in fp16: squared gradients lie far below fp16's smallest number. A step that moves a
state by less than half an ulp would never change it (the second moment of Adam with beta2 = 0.999 moves
by a thousandth), so states are rounded stochastically: right on average.

halfstep's own update reads and writes them as they are. Around the step of any other optimizer they are fp32: made
before it, rounded after it; that is 4 bytes an element more while it lasts. A state that an optimizer makes in bf16
itself stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from halfstep.formats import LOW_DTYPES
from halfstep.kernels.choose import KERNEL_TYPES
from halfstep.kernels.reference.operators import FIRST, stochastic_bf16
from halfstep.kernels.sharded import local, shard_of, sharded_like
from halfstep.weights.attachment import Turn, at_each_step, not_at_each_step, refuse_unhooked, skipped
from halfstep.weights.draws import Draws


class LowStates:
    """Keeps the states of one optimizer, to which weight stores are attached already, in bf16 between its steps.

    Only plain tensors, or DTensors, in the shape of their parameter: step counts and factored moments are few, and stay
    fp32; nested states stay what they are. `draws` is shared with a store that has some.
    """

    _known: weakref.WeakKeyDictionary[Optimizer, LowStates] = weakref.WeakKeyDictionary()

    def __init__(self, optimizer: Optimizer, draws: Draws | None = None) -> None:
        refuse_unhooked(optimizer)
        self.draws = Draws() if draws is None else draws
        self.draws.shared = True
        self.draws.save_with(optimizer)
        self._own: MutableMapping[Tensor, None] = WeakIdKeyDictionary()  # what the optimizer itself has made in bf16
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        self._known[optimizer] = self
        self._after_load(optimizer)

    @classmethod
    def of(cls, optimizer: Optimizer) -> LowStates | None:
        """Return what keeps the states of `optimizer` low, or None."""
        return cls._known.get(optimizer)

    def copied(self, state: Tensor, copy: Tensor) -> None:
        """Treat `copy` as the `state` whose place it takes."""
        if state in self._own:
            self._own[copy] = None

    @classmethod
    def keep_low(cls, parameters: Iterable[nn.Parameter], draws: Draws | None = None) -> None:
        """Keep the states of every optimizer low that steps one of `parameters`, also if it is made later."""
        for parameter in parameters:
            LISTED[parameter] = draws
            at_each_step(Turn.LOW_STATES, parameter, _keep_if_listed)

    @classmethod
    def release(cls, parameters: set[int]) -> None:
        """Give optimizers with any of `parameters` (ids) their fp32 states back, and keep none low from now on."""
        for parameter in [p for p in LISTED if id(p) in parameters]:
            del LISTED[parameter]
            not_at_each_step(Turn.LOW_STATES, id(parameter))
        for optimizer, states in list(cls._known.items()):
            if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
                for handle in states._handles:
                    handle.remove()
                states._before_step(optimizer, (), {})
                states.draws.leave(optimizer)
                del cls._known[optimizer]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in _elementwise(parameter, state):
                if value not in self._own:
                    state[name] = value.float()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place, device = 0, None
        for group in optimizer.param_groups:
            # low parameters first: the order in which halfstep's own update hands out random bits
            stepped = [p for p in group["params"] if p.grad is not None]
            for parameter in sorted(stepped, key=lambda p: p.dtype not in LOW_DTYPES):
                state, device = optimizer.state.get(parameter, {}), parameter.device
                for stream, (name, value) in enumerate(_elementwise(parameter, state), start=FIRST):
                    if value.dtype is torch.bfloat16:
                        self._own[value] = None
                    else:
                        part = local(value)  # of a sharded state (DTensor) each rank rounds its part
                        bits = self.draws.bits(place, min(stream, 3), part, shard_of(value))
                        state[name] = sharded_like(value, stochastic_bf16(part, bits))
                place += 1
        if device is not None and not skipped(optimizer):
            self.draws.advance(device)

    def _after_load(self, optimizer: Optimizer) -> None:  # rounds to nearest: exact for what was saved from low states
        for parameter, state in optimizer.state.items():
            for name, value in _elementwise(parameter, state):
                state[name] = value.to(torch.bfloat16)


LISTED: MutableMapping[nn.Parameter, Draws | None] = WeakIdKeyDictionary()
"""The parameters whose optimizer states are to be low; an optimizer made later is found when it steps."""


def _keep_if_listed(optimizer: Optimizer) -> None:
    if not LISTED or optimizer in LowStates._known:
        return
    found = next((p for group in optimizer.param_groups for p in group["params"] if p in LISTED), None)
    if found is not None:
        LowStates(optimizer, LISTED[found])


def _elementwise(parameter: object, state: object) -> list[tuple[str, Tensor]]:
    if not isinstance(parameter, Tensor) or not isinstance(state, dict):
        return []  # shared by all parameters, or None in a ZeroRedundancyOptimizer: another rank has it
    return [
        (name, value)
        for name, value in state.items()
        if name != "step"
        and isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype in {torch.float32, torch.bfloat16}
        and type(local(value)) in KERNEL_TYPES  # others may say fp32 of integers and their scales
        and value.layout is torch.strided
    ]
