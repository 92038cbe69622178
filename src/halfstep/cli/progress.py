"""Progress of long commands: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (  # fmt: skip
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import halfstep as hs
from halfstep.cli.terminal import say
from halfstep.tasks.compare import Moment

__all__ = ["Live", "Watch"]

SECONDS = 0.25  # between two readings of the numbers: faster than a person reads, and rare beside a step


class _Bar:
    """A bar on `err` while a block runs; `bar` is None where that is no terminal."""

    def __init__(self, err: Console, total: float, *columns: ProgressColumn, **fields: Any) -> None:
        self._err = err
        self.bar: Progress | None = None
        if err.is_terminal:
            self.bar = Progress(*columns, console=err, transient=True)
            self.id = self.bar.add_task("", total=total, **fields)

    def __enter__(self) -> _Bar:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()


class Watch(_Bar):
    """Shows phases of a command and their results; a context manager."""

    def __init__(self, err: Console) -> None:
        super().__init__(err, 1.0, BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._phase = ""

    def __enter__(self) -> Watch:
        super().__enter__()
        return self

    def see(self, share: float, phase: str = "", note: str = "") -> None:
        """Show how far the command has come.

        Args:
            share: of the whole, from 0 to 1.
            phase: what it does now; a new one is a new line where there is no bar. "": as before.
            note: a line that stays.
        """
        if phase and phase != self._phase:
            self._phase = phase
            if self.bar is None:
                say(self._err, f"[{100 * share:.0f} %] {phase} ...")
        if self.bar is not None:
            self.bar.update(self.id, completed=share, description=self._phase)
        if note:
            say(self._err, note)


class Live(_Bar):
    """Shows the moments of one comparison; a context manager whose `see` is `compare`'s `on_step`."""

    def __init__(
        self, err: Console, name: str, *, runs: int, steps: int, seeds: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"))
        super().__init__(err, runs * steps * seeds, TextColumn(name, markup=False), *columns, numbers="")
        self._name, self._steps, self._seeds = name, steps, seeds
        self._clock, self._next = clock, clock()
        self._latest: dict[str, Moment] = {}
        if self.bar is None:
            say(err, f"{name}: {runs} runs of {steps} steps, {seeds} seeds ...")

    def __enter__(self) -> Live:
        super().__enter__()
        return self

    def see(self, moment: Moment) -> None:
        """Take in one step of one candidate; its numbers are read now and then, as that waits for the device."""
        self._latest[moment.label] = moment
        if self.bar is None and moment.last:
            ends = sorted(f"{label} {float(latest.loop.loss):.4g}" for label, latest in self._latest.items())
            seed = f"seed {moment.seed + 1} of {self._seeds}"
            say(self._err, f"{self._name}: {seed}, loss after {self._steps} steps: {', '.join(ends)}")
        elif self.bar is not None:
            self.bar.advance(self.id)
            if self._clock() >= self._next:
                self._next = self._clock() + SECONDS
                numbers = f"seed {moment.seed + 1}/{self._seeds}, {moment.label}, {_numbers(moment)}"
                self.bar.update(self.id, numbers=numbers)


def _numbers(moment: Moment) -> hs.step.StepMetrics:
    """Return the numbers of the candidate that has just made a step."""
    loop = moment.loop
    return hs.step.StepMetrics(
        step=moment.step,
        loss=float(loop.loss),
        scale=loop.scale(),
        skipped=len(loop.skipped()),
        grad_norm=float(loop.grad_norm),
        samples_per_second=moment.samples_per_second,
    )
