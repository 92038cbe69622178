"""Signals that wait for the end of a critical part: Ctrl-C never falls between weights and what belongs to them.

Python calls a signal's handler between two bytecodes of the main thread. Inside a `Deferral` a signal that has a handler
in Python is remembered, and its handler is called where the critical part ends. A second signal of the same number is
not deferred: a part that hangs can still be interrupted. Signals without a handler in Python do what they do.

Calling the wrappers of the module `signal` costs 3 microseconds each, for they look up names; those below them 0.3.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # below `signal`, for its speed; typeshed does not have it
import signal
import threading
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Deferral"]

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGBREAK")
NUMBERS = tuple(int(getattr(signal, name)) for name in NAMES if hasattr(signal, name))

Handler = Callable[[int, "FrameType | None"], Any]


class Deferral:
    """A context manager in which signals wait; it can be entered again and again, and does nothing in other threads.

    Note [left behind]: an exception in the middle of entering or leaving can leave `_defer` installed. Outside a
    critical part it puts the handler it stands for back and calls it, so that nothing is lost.
    """

    __slots__ = ("_handlers", "_on", "_waiting")

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}  # what `_defer` stands for
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._on = False

    def __enter__(self) -> None:
        if get_ident() != threading.main_thread().ident:
            return
        for number in NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler) and getattr(handler, "__self__", None) is not self:
                self._handlers[number] = handler
                _signal.signal(number, self._defer)
        self._on = True

    def __exit__(self, *raised: object) -> None:
        if not self._on:
            return
        self._on = False
        for number, handler in self._handlers.items():
            if getattr(_signal.getsignal(number), "__self__", None) is self:
                _signal.signal(number, handler)
        if self._waiting:
            self._deliver()

    def _defer(self, number: int, frame: FrameType | None) -> None:
        """Stand for a handler of the user's."""
        handler = self._handlers[number]
        if not self._on:  # note [left behind]
            _signal.signal(number, handler)
        elif all(known != number for known, _ in self._waiting):
            self._waiting.append((number, frame))
            return
        handler(number, frame)

    def _deliver(self) -> None:
        """Call the handlers of the signals that wait, all of them, also if one raises."""
        if self._waiting:
            number, frame = self._waiting.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._deliver()
