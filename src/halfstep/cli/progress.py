"""Progress of long commands: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import halfstep as hs
from halfstep.cli.terminal import say
from halfstep.tasks.loops import Loop, Training

SECONDS = 0.25  # between two readings of the numbers: faster than a person reads, and rare beside a step


class Watch(Progress):
    """Shows phases of a command and their results; a context manager."""

    def __init__(self, err: Console) -> None:
        columns = (
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        super().__init__(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.add_task("", total=1.0)

    def see(self, share: float, phase: str = "", note: str = "") -> None:
        """Show how far the command has come: a share, its phase ("": as before), and a note, which stays."""
        (task,) = self.tasks
        phase = phase or task.description
        if self.disable and phase != task.description:
            say(self.console, f"[{100 * share:.0f} %] {phase} ...")
        self.update(task.id, completed=share, description=phase)
        if note:
            say(self.console, note)


class Live(Watch):
    """Shows the steps of one comparison; `step` is `compare`'s `on_step`."""

    def __init__(
        self, err: Console, name: str, *, runs: int, steps: int, seeds: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(err)
        self._name, self._runs, self._steps, self._seeds = name, runs, steps, seeds
        self._clock, self._next, self._seen = clock, clock(), 0
        if self.disable:
            say(err, f"{name}: {runs} runs of {steps} steps, {seeds} seeds ...")

    def step(self, training: Training, label: str, number: int, seconds: float) -> None:
        """Take in one step of one candidate; its numbers are read now and then, as that waits for the device."""
        self._seen += 1
        if self.disable and self._seen % (self._runs * self._steps) == 0:
            ends = sorted(f"{name} {float(loop.loss):.4g}" for name, loop in training.loops.items())
            seed = f"seed {training.seed + 1} of {self._seeds}"
            say(self.console, f"{self._name}: {seed}, loss after {self._steps} steps: {', '.join(ends)}")
        elif not self.disable and self._clock() >= self._next:
            self._next = self._clock() + SECONDS
            numbers = _numbers(training.loops[label], number + 1, training.batch, seconds)
            text = f"{self._name}: seed {training.seed + 1}/{self._seeds}, {label}, {numbers}"
            self.see(self._seen / (self._runs * self._steps * self._seeds), text)


def _numbers(loop: Loop, step: int, batch: tuple[Any, ...], seconds: float) -> hs.step.StepMetrics:
    samples = next((len(tensor) for tensor in hs.trees.tensors(batch) if tensor.dim()), 1)
    return hs.step.StepMetrics(
        step=step, loss=float(loop.loss), scale=loop.scale(), skipped=len(loop.skipped()),
        grad_norm=float(loop.grad_norm), samples_per_second=samples / seconds,
    )  # fmt: skip
