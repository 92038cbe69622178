"""The loss scale, and retries: a window that overflowed under a dynamic scale runs again at a lower one.

The window is taken back as one that an exception cut off (`Moments.abort`); buffers and generators of random numbers
are put back from the black box's `History`.

Note [counted late]: an attempt that is discarded changes nothing of the scaler. The scale it falls to is computed ahead
(`GradScaler.falls`), and the bad steps are counted in the critical part of the update that is applied. So a cut in the
middle of a retry leaves the scaler where it was, and a window that stays bad counts as one bad step, as without retry:
a batch whose gradient is nan at every scale lowers it once.

Note [ranks]: ranks that average gradients share the verdict and the scale, so they decide alike without a collective.
What only one rank sees, a batch that was written to, must not be decided by it alone: there it runs the attempts with
the others and starts its backward passes from nan, so that the window is skipped on all of them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from halfstep.errors import ScaleError
from halfstep.events import StepResult
from halfstep.meeting import processes
from halfstep.scale.scaler import GradScaler
from halfstep.step.moments import Moments
from halfstep.step.part import Part, RunMicro
from halfstep.step.parts.ranks import OneRank
from halfstep.step.parts.record import History, MicroBatch, Record, versions_of
from halfstep.trees import tensors
from halfstep.update.updater import Updater

LOG = logging.getLogger("halfstep")


class Scaling(Part):
    """The loss scale of a GradScaler, which moves with each update."""

    def __init__(self, scaler: GradScaler, updater: Updater) -> None:
        self.scaler, self._updater = scaler, updater

    def loss_scale(self, device: torch.device) -> Tensor:
        """Return a copy of the scale: a window has one, also if another step moves the scaler's meanwhile."""
        return self.scaler.scale_on(device).clone()

    def after_update(self, bad: Tensor) -> Exception | None:
        """Count the update and move the scale; return the scale's alarm, if its rule raises one."""
        self.scaler.record(bad, optimizer=self._updater.optimizer)
        try:
            self.scaler.update()
        except (ScaleError, Warning) as error:
            return error
        return None


class Retry(Scaling):
    """The loss scale, and which windows of one training step run again at a lower one."""

    def __init__(
        self, most: int, scaler: GradScaler, updater: Updater, record: Record, ranks: OneRank, moments: Moments
    ) -> None:
        super().__init__(scaler, updater)
        self.most, self.record, self._ranks, self.moments = most, record, ranks, moments
        if record.history is None:
            record.history = History(record.model, examined=False)
            record.history.signals = record.signals
        record.history.keep_generators()
        self.history = record.history
        self._warned = False
        self.begin_call()

    def begin_call(self) -> None:
        """Begin a call of the step; forget what an earlier call has left if it was cut off."""
        self.due = False  # whether the last attempt was discarded, and the window must run again
        self.poisoned = False  # whether backward passes start from nan; see note [ranks]
        self.retries = self._uncounted = 0
        self.fallen: float | None = None  # the loss scale that the window runs with again; None: the scaler's

    def repeats(self, bad: Tensor) -> bool:
        """Return whether the window runs again in the place of its update; waits for the device."""
        self.due = False
        if self.scaler.rule.is_static:
            return False
        self.record.host_reads += 1
        if not bool(bad):
            return False
        found = self._lower() if self.retries < self.most else None
        self.due = found is not None
        self._uncounted, self.fallen = found or (0, self.fallen)
        return self.due

    def _lower(self) -> tuple[int, float] | None:
        """Return how many bad steps of the scaler lead to a lower scale, and that scale; None: the step is skipped."""
        ranks, window = processes()[1] > 1, self.history.window
        if not ranks and not window.finite():  # no scale of a backward pass helps
            return None
        if obstacle := next(self._obstacles(window.batches), ""):
            if not self._warned:
                self._warned = True
                LOG.warning("retry: step %d overflowed and cannot run again: %s. It is skipped", window.last, obstacle)
            if not ranks:
                return None
            self.poisoned = True
        return self.scaler.falls(float(self.record.scale), self._uncounted + self.scaler.rule.hysteresis)

    def _obstacles(self, batches: Sequence[MicroBatch]) -> Iterator[str]:
        """Yield why the micro-batches would not be the same again, and what helps."""
        for micro in batches:
            if any(isinstance(value, Iterator) for value in (*micro.batch, *micro.named.values())):
                yield "the batch holds an iterator, which can be read once; hand the step what it yields"
            found = tensors((micro.batch, micro.named))
            if len(found) != len(micro.tensors) or any(a is not b for a, b in zip(found, micro.tensors, strict=True)):
                yield "loss_fn has changed which tensors the batch holds; let it change a copy: batch = dict(batch)"
            elif versions_of((micro.batch, micro.named)) != micro.versions:
                yield (
                    "its batch has been written to since its forward pass began; let loss_fn work on a copy, and give "
                    "each micro-batch of a window tensors of its own"
                )
            if any(t.requires_grad and t.is_leaf for t in found):
                yield "a tensor of its batch has a gradient, to which another backward pass adds; detach it in loss_fn"
        if name := self.history.unkept():
            yield f"its forward pass has changed the buffer {name!r} for the first time, and no copy was kept"

    def loss_scale(self, device: torch.device) -> Tensor:
        """Return the loss scale of the coming window as a 0-dim fp32 tensor of its own on `device`."""
        if self.fallen is None:
            return super().loss_scale(device)
        return torch.full((), self.fallen, dtype=torch.float32, device=device)

    def seed(self, seed: Tensor) -> Tensor:
        """Return nan where the window must be skipped on all ranks; see note [ranks]."""
        return seed * float("nan") if self.poisoned else seed

    def again(self, result: StepResult, run: RunMicro, finish: Callable[[], StepResult] | None) -> StepResult:
        """Run the micro-batches of a window that was discarded again, as often as it is."""
        while self.due:
            batches = self.history.window.batches
            for abort in self.moments.abort:
                abort(written=False)
            self.history.restore()
            self.retries += 1
            if not batches:  # a flush, and other ranks have some
                self._ranks.keep_up()
                self.moments.begin()
                self.record.scale = self.loss_scale(self.record.scale.device)
            for kept in batches:
                if kept.put_generators is not None:
                    kept.put_generators()
                result = run(kept.batch, kept.named)
            if finish is not None:
                result = finish()
        result.retries = self.retries
        return result

    def after_update(self, bad: Tensor) -> Exception | None:
        """Count the attempts that were discarded, now that one was applied, and this one."""
        raised: Exception | None = None
        for _ in range(self._uncounted):
            raised = super().after_update(torch.ones_like(bad)) or raised
        self._uncounted = 0
        return super().after_update(bad) or raised
