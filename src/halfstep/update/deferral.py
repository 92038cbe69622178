"""Signals that wait: an update that has begun to write is completed before Ctrl-C or SIGTERM is acted on."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # below `signal`, which takes 3 us a call; typeshed does not have it
import signal
import threading
from _thread import get_ident
from collections.abc import Callable
from operator import is_
from types import FrameType
from typing import Any

__all__ = ["Deferral"]

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGBREAK")
NUMBERS = tuple(int(getattr(signal, name)) for name in NAMES if hasattr(signal, name))

Handler = Callable[[int, "FrameType | None"], Any]


class Deferral:
    """A context manager that defers signals to its end; it can be entered again and again.

    Python calls a signal's handler between two bytecodes of the main thread. Here a signal whose handler is a Python
    function is remembered, and its handler is called at the end. A second signal of the same number is not deferred: a
    part that hangs can still be interrupted. Other signals, and other threads, are not affected.

    Note [left behind]: an exception in the middle of entering or leaving can leave `_defer` installed. Outside of the
    block it restores the handler it stands for and calls it, so no signal is lost.
    """

    __slots__ = ("_found", "_handlers", "_mine", "_on", "_waiting")

    def __init__(self) -> None:
        self._mine = self._defer  # one object, by which it is recognised
        self._found: list[Any] = []  # the handlers there were when it was entered last
        self._handlers: dict[int, Handler] = {}  # those of them that `_defer` stands for
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._on = False

    def __enter__(self) -> None:
        if get_ident() != threading.main_thread().ident:
            return
        found = [*map(_signal.getsignal, NUMBERS)]
        if len(found) != len(self._found) or not all(map(is_, found, self._found)):
            known = self._handlers  # also for what is left behind
            self._handlers = {
                number: known[number] if handler is self._mine else handler
                for number, handler in zip(NUMBERS, found, strict=True)
                if callable(handler)
            }
            self._found = found
        for number in self._handlers:
            _signal.signal(number, self._mine)
        self._on = True

    def __exit__(self, *raised: object) -> None:
        if not self._on:
            return
        self._on = False
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is self._mine:
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
        """Call the handlers of the deferred signals, all of them, also if one raises."""
        if self._waiting:
            number, frame = self._waiting.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._deliver()
