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
from torch.utils.hooks import RemovableHandle

Call = Callable[[Optimizer], None]


class Turn(IntEnum):
    """In which order the calls before a step are made; an optimizer's own hooks, which calls can add, run after them.

    A weight store is attached to an optimizer before its states become low: the attachment re-keys them.
    """

    ATTACH = 0
    LOW_STATES = 1
    CHECK = 2


class _EveryStep:
    """The calls before and after a step, by turn; what needs them, as (turn, id); and torch's hooks meanwhile."""

    def __init__(self) -> None:
        self.calls: dict[Turn, tuple[Call, Call]] = {}
        self.users: set[tuple[Turn, int]] = set()
        self.handles: list[RemovableHandle] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for turn in sorted(self.calls):
            self.calls[turn][0](optimizer)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for turn in sorted(self.calls):
            self.calls[turn][1](optimizer)

    def leave(self, user: tuple[Turn, int]) -> None:
        """Forget `user`; the last one takes the hooks along."""
        self.users.discard(user)
        if not self.users:
            while self.handles:
                self.handles.pop().remove()


@cache
def _every_step() -> _EveryStep:
    return _EveryStep()


def _nothing(optimizer: Optimizer) -> None:
    """Do nothing."""


def at_each_step(turn: Turn, user: object, before: Call, after: Call = _nothing) -> None:
    """Call `before` and `after` around every step of any optimizer as long as `user` lives.

    Each turn has one pair of calls, for all its users.
    """
    every = _every_step()
    every.calls[turn] = before, after
    if (turn, id(user)) not in every.users:
        every.users.add((turn, id(user)))
        weakref.finalize(user, every.leave, (turn, id(user))).atexit = False
    if not every.handles:
        hooks = register_optimizer_step_pre_hook(every.before), register_optimizer_step_post_hook(every.after)
        every.handles = list(hooks)


def not_at_each_step(turn: Turn, user: object) -> None:
    """End what `at_each_step` began for `user`."""
    _every_step().leave((turn, id(user)))
