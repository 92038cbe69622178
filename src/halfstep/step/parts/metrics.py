"""Metrics: what a run is doing, read without ever waiting for the device.

Every N updates the latest numbers are packed into one tensor, whose copy lands on the host (`Landing`) usually a step
or two later. The names of gradients that were not finite come from norms that the update has computed anyway.
"""

import time
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.accelerators import Landing
from halfstep.arguments import COUNT, check
from halfstep.errors import StepError, warn
from halfstep.events import StepResult
from halfstep.step.part import Part
from halfstep.trees import tensors
from halfstep.update.updater import Culprits

MOST_WAITING = 1000
"""Records that are kept for a `poll` that does not come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One line of a run's log.

    Attributes:
        step: micro-batches seen so far.
        loss: mean of the unscaled losses since the record before.
        scale: loss scale of the last backward pass (1.0 without scaling).
        skipped: updates not applied since the metrics began.
        grad_norm: unscaled gradient norm of the last update, before clipping.
        samples_per_second: samples since the record before by the host's clock; the first dimension of a batch's first
            tensor counts.
        culprits: names of the parameters whose gradients were not finite in the last update, of those since the record
            before, that was not applied; empty if all were applied.
    """

    step: int
    loss: float
    scale: float
    skipped: int
    grad_norm: float
    samples_per_second: float
    culprits: tuple[str, ...] = ()

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the record but `step`, by name, as the loggers of other libraries take them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in {"step", "culprits"}}

    def __str__(self) -> str:
        return (
            f"step {self.step}: loss {self.loss:.4g}, scale {self.scale:g}, {self.skipped} skipped, "
            f"gradient norm {self.grad_norm:.3g}, {self.samples_per_second:,.0f} samples/s"
            f"{', not finite: ' * bool(self.culprits)}{', '.join(self.culprits)}"
        )


class MetricsLogger(Protocol):
    """What takes records, such as the loggers of `hs.integrations.loggers`."""

    def add(self, record: StepMetrics, /) -> object:
        """Log a record at its step."""


class Metrics(Part):
    """Collects what `TrainStep` returns; made by `TrainStep.metrics`.

    Attributes:
        every: updates between two records.
        dropped: records that were dropped, the oldest first, because 1,000 newer ones were not polled.

    Examples:
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
        >>> metrics = step.metrics(every=3)
        >>> for x, y in batches:
        ...     result = step(x, y)
        ...     for record in metrics.poll():
        ...         print(record.step, record.skipped)
        3 0
    """

    def __init__(self, every: int, *, to: MetricsLogger | None = None) -> None:
        check("metrics", StepError, every=(every, COUNT))
        if to is not None and not callable(getattr(to, "add", None)):
            found = f"metrics(to={to!r}): expected a logger with a method add(record)"
            raise StepError(f"{found}, such as hs.integrations.loggers.TensorBoard(folder)")
        self.every, self.dropped, self._to = every, 0, to
        self._since = time.perf_counter()
        self._updates = self._losses = self._samples = 0
        self._loss: Tensor | float = 0.0
        self._skipped: Tensor | float = 0.0
        self._culprits: Culprits | None = None  # of the last update since the record before that was not applied
        self._waiting: deque[tuple[int, float, Landing, Culprits | None]] = deque()

    def end_call(self, result: StepResult, batch: Any) -> None:
        """Take in one micro-batch, or the update of an unfinished window."""
        if batch is not None:
            self._loss = result.loss.to(torch.float32) + self._loss
            self._losses += 1
            first = next(iter(tensors(batch)), None)
            self._samples += 1 if first is None or not first.dim() else first.shape[0]
        if not result.due:
            return
        self._skipped = result.skipped.to(torch.float32) + self._skipped
        self._updates += 1
        self._note(result)
        if self._updates % self.every == 0 and self._losses:  # 0: a flush in which only other ranks had micro-batches
            self._send(result)
        if self._to is not None:
            self.poll()

    def _note(self, result: StepResult) -> None:
        """Keep the norms of an update that was not applied, by a choice that the device makes."""
        found, known = result.find_culprits, self._culprits
        if isinstance(found, Culprits):
            same = known is not None and known.norms.shape == found.norms.shape
            before = known.norms if known is not None and same else torch.zeros_like(found.norms)
            self._culprits = replace(found, norms=torch.where(result.skipped, found.norms, before))

    def _send(self, result: StepResult) -> None:
        assert isinstance(self._loss, Tensor) and isinstance(self._skipped, Tensor)
        device = self._loss.device
        parts = (self._loss / self._losses, result.scale, self._skipped, result.grad_norm)
        packed = torch.stack([part.to(device=device, dtype=torch.float32) for part in parts])
        culprits = self._culprits
        if culprits is not None:
            packed = torch.cat([packed, culprits.norms.to(packed)])
        landing = Landing().take([packed])
        now = time.perf_counter()
        rate = self._samples / (now - self._since) if now > self._since else float("nan")
        self._waiting.append((result.step, rate, landing, culprits))
        self._loss, self._losses, self._samples, self._since, self._culprits = 0.0, 0, 0, now, None
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            if not self.dropped:
                warn(
                    f"{MOST_WAITING} records of step.metrics(every={self.every}) were not polled, and the oldest are "
                    "dropped; call metrics.poll() in the loop, or give it a logger: step.metrics(to=...)"
                )
            self.dropped += 1

    def poll(self) -> list[StepMetrics]:
        """Return the records that have arrived since the last call, oldest first; never waits."""
        return self._records(wait=False)

    def flush(self) -> list[StepMetrics]:
        """Return every record that is still on its way; waits for the device. For the end of a run."""
        return self._records(wait=True)

    def _records(self, *, wait: bool) -> list[StepMetrics]:
        """Take the records that are there, and give them to the logger."""
        found = []
        while self._waiting:
            step, rate, landing, culprits = self._waiting[0]
            if not wait and not landing.there():
                break
            self._waiting.popleft()
            (packed,) = landing.landed()
            loss, scale, skipped, norm, *_ = packed.tolist()
            found.append(
                StepMetrics(
                    step=step,
                    loss=loss,
                    scale=scale,
                    skipped=int(skipped),
                    grad_norm=norm,
                    samples_per_second=rate,
                    culprits=() if culprits is None else replace(culprits, norms=packed[4:])(),
                )
            )
            if self._to is not None:
                self._to.add(found[-1])
        return found
