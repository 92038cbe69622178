"""Watch: how far a long command has come: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from halfstep.cli.terminal import say

__all__ = ["Watch"]


class Watch:
    """Shows phases of a command and their results on `err`; a context manager."""

    def __init__(self, err: Console) -> None:
        self._err = err
        self._bar: Progress | None = None
        if err.is_terminal:
            columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=err, transient=True)
            self._id = self._bar.add_task("", total=1.0)
        self._phase = ""

    def __enter__(self) -> Watch:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def see(self, share: float, phase: str = "", note: str = "") -> None:
        """Show how far the command has come.

        Args:
            share: of the whole, from 0 to 1.
            phase: what it does now; a new one is a new line where there is no bar. "": as before.
            note: a line that stays.
        """
        if phase and phase != self._phase:
            self._phase = phase
            if self._bar is None:
                say(self._err, f"[{100 * share:.0f} %] {phase} ...")
        if self._bar is not None:
            self._bar.update(self._id, completed=share, description=self._phase)
        if note:
            say(self._err, note)
