"""What region this thread is in. A property of a thread and a moment, hence thread-local; nothing else is global."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.cast.copies import Copies
    from halfstep.cast.rules.dispatch import RuleMode


class _State(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.mode: RuleMode | None = None  # of the innermost region; those of outer regions, on torch's stack, are off
        self.bound: Any = None  # the innermost recipe opened by a bound module or a training step, or `HandCode`
        self.statistics: Any = None  # `Statistics` of the running training step: prepared models are added to it
        self.records = True  # whether the forward pass that a low model is in began with gradients recorded
        self.frames: list[Any] = []  # the open regions, innermost last
        self.casts: dict[Hashable, Any] = {}  # the low tensors that `dispatch` caches until the outermost region ends
        self.copies: Copies | None = None  # the low weights of the running training step
        self.above: Any = None  # a function mode above those of all regions: it sees operators as they are called
        self.marked: Callable[[], Any] | None = None  # weak: the hooks `recompute.mark_checkpoints` examined last


STATE = _State()


class HandCode:
    """What `STATE.bound` is where a user's code runs, and no module's forward, in a region that would make it `bound`.

    In the loss function of a step whose parameters are low: by hand it reads their fp32 values (`kernels.watched`).
    """

    __slots__ = ("bound",)

    def __init__(self, bound: Any) -> None:
        self.bound = bound


hand_code = functools.cache(HandCode)  # one for a recipe: compiled code is guarded by it


def in_forward() -> bool:
    """Return whether the forward pass of a prepared model runs in this thread."""
    return STATE.bound is not None and type(STATE.bound) is not HandCode


def forward_records() -> bool | None:
    """Return whether the forward pass that runs in this thread began with gradients recorded; None: there is none."""
    return STATE.records if in_forward() else None
