"""Calls around the steps of all optimizers of the process, made after `hs.prepare` too, while something needs them."""

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
    """The order of calls. A store is attached to an optimizer before its states, which that re-keys, become low."""

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


_every_step = cache(_EveryStep)


def at_each_step(turn: Turn, user: object, before: Call, after: Call = lambda optimizer: None) -> None:
    """Call `before` and `after`, one pair for all users of a turn, around every step as long as `user` lives."""
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
