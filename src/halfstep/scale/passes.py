"""Which gradients the backward pass of a scaled loss changes, once an optimizer has been unscaled.

A gradient that appears or changes between `unscale_` and `step` may be the user's work (clipping, a replacement) or a
backward pass's, and versions and addresses do not tell which. So a scaled loss that is still to be differentiated while
an optimizer is unscaled gets a hook: gradients are compared when its backward pass begins and when it has ended. Loops
that call `update` after every step have no such loss and pay for a weak reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.weak import TensorWeakRef

__all__ = ["Followed", "Pass"]

_ROOM = 16
"""Weak references kept before dead ones are thrown away."""


class Pass:
    """The gradients of an optimizer when a backward pass began."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Note parameters, gradients and versions as they are now."""
        self._before = [
            (parameter, parameter.grad, _version(parameter.grad))
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def empty(self) -> set[int]:
        """Return the ids of the parameters that had no gradient."""
        return {id(parameter) for parameter, gradient, _ in self._before if gradient is None}

    def changed(self) -> tuple[set[int], set[int]]:
        """Return the ids of the parameters whose gradient is new since then, and of those whose gradient changed."""
        made: set[int] = set()
        added: set[int] = set()
        for parameter, gradient, version in self._before:
            now = parameter.grad
            if now is None or (now is gradient and _version(now) == version):
                continue
            (made if gradient is None else added).add(id(parameter))
        return made, added


class Followed:
    """The scaled losses whose backward pass is still to come, as far as they live."""

    def __init__(self, begins: Callable[[], Callable[[], None] | None]) -> None:
        """Follow none yet.

        Args:
            begins: called when a backward pass of a hooked loss begins; returns what to call when it has ended, if
                anything.
        """
        self._begins = begins
        self._waiting: list[TensorWeakRef] = []
        self._room = _ROOM

    def add(self, scaled: Tensor, *, now: bool) -> None:
        """Follow a scaled loss: with a hook `now`, or from the next `hook`."""
        if now:
            self._hook(scaled)
            return
        if len(self._waiting) >= self._room:
            self._waiting = [one for one in self._waiting if one() is not None]
            self._room = 2 * len(self._waiting) + _ROOM
        self._waiting.append(TensorWeakRef(scaled))

    def hook(self) -> None:
        """Give a hook to every loss that lives and has none."""
        for one in self._waiting:
            if (scaled := one()) is not None:
                self._hook(scaled)
        self._waiting.clear()

    def _hook(self, scaled: Tensor) -> None:
        if scaled.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(scaled):
            scaled.register_hook(self._begun)

    def _begun(self, gradient: Tensor) -> None:
        if (ended := self._begins()) is not None:
            engine: Any = Variable._execution_engine
            engine.queue_callback(ended)


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
