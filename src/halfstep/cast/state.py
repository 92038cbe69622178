"""What region this thread is in. A property of a thread and a moment, hence thread-local; nothing else is global."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halfstep.cast.copies.cache import WeightCasts

if TYPE_CHECKING:
    from halfstep.cast.copies.kept import Copies
    from halfstep.cast.rules.dispatch import RuleMode

__all__ = ["STATE"]


class _State(threading.local):
    """State of one thread.

    Attributes:
        mode: the mode of the innermost region; the modes of outer regions, still on torch's stack, stand aside.
        bound: the innermost recipe opened by a bound module or a training step, or None.
        visit: the statistics of the training step that runs in this thread (`models`, and `add` for one that is not
            among them), which every prepared model meets before it runs; or None.
        frames: the open regions, innermost last.
        casts: the weight casts of the open regions.
        copies: the low weights of the training step that runs in this thread, or None.
        above: a function mode that stays above those of all regions (it sees operators as they are called), or None.
        seen: the hooks for saved tensors that `recompute.remember` has looked at last, by reference.
    """

    def __init__(self) -> None:
        self.mode: RuleMode | None = None
        self.bound: Any = None
        self.visit: Any = None
        self.frames: list[Any] = []
        self.casts = WeightCasts()
        self.copies: Copies | None = None
        self.above: Any = None
        self.seen: Callable[[], Any] | None = None


STATE = _State()
