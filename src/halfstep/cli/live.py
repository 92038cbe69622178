"""Live: what a long comparison is doing. One line that changes on a terminal, a plain line a seed otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import halfstep as hs
from halfstep.cli.terminal import say
from halfstep.tasks.compare import Moment

__all__ = ["Live"]

SECONDS = 0.25  # between two readings of the numbers: faster than a person reads, and rare beside a step


def read(moment: Moment) -> hs.step.StepMetrics:
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


class Live:
    """Shows the moments of one comparison; a context manager whose `see` is `compare`'s `on_step`."""

    def __init__(
        self, console: Console, name: str, *, runs: int, steps: int, seeds: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._console = console
        self._name, self._steps, self._seeds = name, steps, seeds
        self._clock = clock
        self._next = clock()
        self._latest: dict[str, Moment] = {}
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, TextColumn("{task.fields[numbers]}"), console=console, transient=True)
            self._bar = self._progress.add_task(name, total=runs * steps * seeds, numbers="")
        else:
            say(console, f"{name}: {runs} runs of {steps} steps, {seeds} seeds ...")

    def __enter__(self) -> Live:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def see(self, moment: Moment) -> None:
        """Take in one step of one candidate."""
        self._latest[moment.label] = moment
        if self._progress is None:
            if moment.last:
                say(self._console, self._summary(moment.seed))
            return
        self._progress.advance(self._bar)
        if self._clock() >= self._next:
            self._next = self._clock() + SECONDS
            numbers = f"seed {moment.seed + 1}/{self._seeds}, {moment.label}, {read(moment)}"
            self._progress.update(self._bar, numbers=numbers)

    def _summary(self, seed: int) -> str:
        """Return one line on where every candidate ended."""
        ends = (f"{label} {float(moment.loop.loss):.4g}" for label, moment in sorted(self._latest.items()))
        return (
            f"{self._name}: seed {seed + 1} of {self._seeds}, loss after {self._steps} steps: {', '.join(sorted(ends))}"
        )
