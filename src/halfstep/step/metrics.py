"""Metrics: what a run is doing, read without ever waiting for the device.

Every N updates the latest numbers are packed into one tensor and copied to pinned memory behind the work already
queued; `Metrics.poll` hands a record out once its copy has arrived, usually a step or two later. On a CPU there is
nothing to wait for and the record is there at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import StepError
from halfstep.events import StepResult
from halfstep.trees import tensors

__all__ = ["Metrics", "StepMetrics"]


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
    """

    step: int
    loss: float
    scale: float
    skipped: int
    grad_norm: float
    samples_per_second: float

    def __str__(self) -> str:
        """Return one readable line."""
        return (
            f"step {self.step}: loss {self.loss:.4g}, scale {self.scale:g}, {self.skipped} skipped, "
            f"gradient norm {self.grad_norm:.3g}, {self.samples_per_second:,.0f} samples/s"
        )


class Metrics:
    """Collects what `TrainStep` returns; made by `TrainStep.metrics`.

    Example:
        >>> metrics = step.metrics(every=50)
        >>> for x, y in batches:
        ...     step(x, y)
        ...     for record in metrics.poll():
        ...         print(record)
    """

    def __init__(self, every: int, clock: Callable[[], float] = time.perf_counter) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise StepError(f"metrics(every={every!r}): expected a whole number of updates from 1")
        self.every = every
        self._clock = clock
        self._since = clock()
        self._updates = self._losses = self._samples = 0
        self._loss: Tensor | None = None
        self._skipped: Tensor | None = None
        self._waiting: deque[tuple[int, float, Tensor, Any]] = deque()

    def see(self, result: StepResult, batch: Any, *, updated: bool) -> None:
        """Take in one micro-batch; `updated` says whether an update was due after it."""
        loss = result.loss.to(torch.float32)
        self._loss = loss if self._loss is None else self._loss + loss
        self._losses += 1
        first = next(iter(tensors(batch)), None)
        self._samples += 1 if first is None or not first.dim() else first.shape[0]
        if updated:
            self.count(result)

    def count(self, result: StepResult) -> None:
        """Take in an update, also that of an unfinished window."""
        skipped = result.skipped.to(torch.float32)
        self._skipped = skipped if self._skipped is None else self._skipped + skipped
        self._updates += 1
        if self._updates % self.every == 0 and self._losses:  # 0: a flush in which only other ranks had micro-batches
            self._send(result)

    def _send(self, result: StepResult) -> None:
        assert self._loss is not None and self._skipped is not None
        device = self._loss.device
        parts = (self._loss / self._losses, result.scale, self._skipped, result.grad_norm)
        packed = torch.stack([part.to(device=device, dtype=torch.float32) for part in parts])
        arrived: Any = None
        if device.type == "cuda":
            pinned = torch.empty_like(packed, device="cpu", pin_memory=True)
            packed = pinned.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        now = self._clock()
        rate = self._samples / (now - self._since) if now > self._since else float("nan")
        self._waiting.append((result.step, rate, packed, arrived))
        self._loss, self._losses, self._samples, self._since = None, 0, 0, now

    def poll(self) -> list[StepMetrics]:
        """Return the records that have arrived since the last call, oldest first; never waits."""
        return self._records(wait=False)

    def flush(self) -> list[StepMetrics]:
        """Return every record that is still on its way; waits for the device. For the end of a run."""
        return self._records(wait=True)

    def _records(self, *, wait: bool) -> list[StepMetrics]:
        found = []
        while self._waiting:
            step, rate, packed, arrived = self._waiting[0]
            if arrived is not None and not wait and not arrived.query():
                break
            if arrived is not None:
                arrived.synchronize()
            self._waiting.popleft()
            loss, scale, skipped, norm = packed.tolist()
            found.append(
                StepMetrics(
                    step=step,
                    loss=loss,
                    scale=scale,
                    skipped=int(skipped),
                    grad_norm=norm,
                    samples_per_second=rate,
                )
            )
        return found
