"""What region this thread is in. A property of a thread and a moment, hence thread-local; nothing else is global."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.cast.copies import Copies
    from halfstep.cast.rules.dispatch import RuleMode


class _State(threading.local):
    """State of one thread.

    Attributes:
        mode: the mode of the innermost region; those of outer regions, still on torch's stack, are inactive.
        bound: the innermost recipe opened by a bound module or a training step, or None.
        statistics: `Statistics` of the training step that runs in this thread, to which every prepared model that is
            not in its `models` is added before it runs; or None.
        frames: the open regions, innermost last.
        casts: the low tensors that `dispatch` caches until the outermost region ends.
        copies: the low weights of the training step that runs in this thread, or None.
        above: a function mode that stays above those of all regions (it sees operators as they are called), or None.
        marked: the hooks for saved tensors that `recompute.mark_checkpoints` has examined last, a weak reference.
    """

    def __init__(self) -> None:
        self.mode: RuleMode | None = None
        self.bound: Any = None
        self.statistics: Any = None
        self.frames: list[Any] = []
        self.casts: dict[Hashable, Any] = {}
        self.copies: Copies | None = None
        self.above: Any = None
        self.marked: Callable[[], Any] | None = None


STATE = _State()


def in_region() -> bool:
    """Return whether a region is open in this thread."""
    return bool(STATE.frames)
