"""Calls before and after the steps of all optimizers of the process: how an optimizer made after `hs.prepare` is found.

torch's hooks on all optimizers are there only while something lives that needs them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["Turn", "at_each_step", "not_at_each_step"]

Call = Callable[[Optimizer], None]


class Turn(IntEnum):
    """In which order the calls before a step are made; an optimizer's own hooks, which calls can add, run after them.

    A weight store is attached to an optimizer before its states become low: the attachment re-keys them.
    """

    ATTACH = 0
    LOW_STATES = 1
    CHECK = 2


class _EveryStep:
    """The calls, and what needs them.

    Attributes:
        calls: what is called before and after a step, by turn.
        users: what needs a call, as (turn, id).
        handles: of torch's hooks, while there are users.
    """

    def __init__(self) -> None:
        self.calls: dict[Turn, tuple[Call | None, Call | None]] = {}
        self.users: set[tuple[Turn, int]] = set()
        self.handles: list[Any] = []

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for _, (call, _) in sorted(self.calls.items()):
            if call is not None:
                call(optimizer)

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for _, (_, call) in sorted(self.calls.items()):
            if call is not None:
                call(optimizer)

    def leave(self, user: tuple[Turn, int]) -> None:
        """Forget `user`; the last one takes the hooks along."""
        self.users.discard(user)
        if not self.users:
            while self.handles:
                self.handles.pop().remove()


@cache
def _every_step() -> _EveryStep:
    return _EveryStep()


def at_each_step(turn: Turn, user: object, *, before: Call | None = None, after: Call | None = None) -> None:
    """Call `before` and `after` around every step of any optimizer as long as `user` lives.

    Args:
        turn: each has one pair of calls, for all its users.
        user: what needs them.
        before: called with the optimizer.
        after: the same.
    """
    every = _every_step()
    every.calls[turn] = before, after
    if (turn, id(user)) not in every.users:
        every.users.add((turn, id(user)))
        weakref.finalize(user, every.leave, (turn, id(user))).atexit = False
    if not every.handles:
        every.handles = [
            register_optimizer_step_pre_hook(every.before),
            register_optimizer_step_post_hook(every.after),
        ]


def not_at_each_step(turn: Turn, user: object) -> None:
    """End what `at_each_step` began for `user`."""
    _every_step().leave((turn, id(user)))
