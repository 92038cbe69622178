"""Windows that end early: a window is flushed, and ranks that have fewer batches join the others."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from halfstep.events import StepResult
from halfstep.step.moments import Phase, one_thread
from halfstep.step.parts.ranks import OneRank, join
from halfstep.step.settings import Settings

__all__ = ["Windows"]


class Windows(Settings):
    """The methods of a `TrainStep` that end windows early."""

    @one_thread
    def flush(self) -> StepResult | None:
        """Update with the micro-batches of an unfinished window (their mean); None if there are none.

        Also reads the last verdict and advances the scheduler. Under DistributedDataParallel with ``accumulate`` > 1 or
        in `join` it is collective and waits for the device: every rank calls it, also one that has none left. Windows
        may differ in length; each micro-batch of any rank counts the same.

        Raises:
            StepError: the window's gradients cannot be averaged over the ranks; on all of them alike.
        """
        if self._moments.phase is Phase.UNDECIDED:
            return None
        moments, record, ranks = self._moments, self.record, self._ranks
        if moments.phase is not Phase.REST:
            moments.resume(record.done)
        moments.grad = torch.is_grad_enabled()
        self._verdicts.settle(wait=True)
        count, scale = float(record.micro_batches), record.scale
        if isinstance(ranks, OneRank):
            ranks.refuse_flush(record.micro_batches, self.accumulate)
        elif self.accumulate > 1 or ranks.joining:
            count, scale = ranks.agree(record.micro_batches, record.scale)
            record.host_reads += 1
        if not count:
            return None

        counts = [count]

        def finish() -> StepResult:  # other ranks run a window again too, and agree anew in a join
            number = counts.pop() if counts else ranks.window(self.accumulate) if ranks.joining else count
            norm, bad, culprits = self._update(number)
            loss = torch.full_like(norm, float("nan"))
            return StepResult(record.done, loss, None, record.scale, norm, bad, True, culprits)

        try:
            moments.phase = Phase.MICRO_BATCH
            for begin in moments.begin_call:
                begin()
            if not record.micro_batches:  # other ranks have micro-batches left
                moments.begin()
                record.scale = scale
            ranks.averaged = False
            result = finish()
            for again in moments.again:
                result = again(result, self._micro_batch, finish)
            moments.phase = Phase.REST
        except BaseException as error:
            moments.cut_off(error)
            raise
        finally:
            ranks.averaged = True
        if record.awaited:
            self._verdicts.examine_at_once(result)
        for end in moments.end_call:
            end(result, None)
        return result

    def join(self) -> AbstractContextManager[None]:
        """Return a context for a loop over batches of which some ranks have fewer: ``with step.join(): ...``.

        A rank that leaves it makes the updates of the others with them, as `flush` does, until none has a micro-batch
        left; all ranks end with the same state. It takes the place of DistributedDataParallel's own `join`. Inside,
        gradients are averaged after the backward pass, and each update waits for the device.

        Raises:
            StepError, UnbuiltError: a model whose passes need all ranks: under fully_shard or with SyncBatchNorm; a
                static graph or a communication hook.
        """
        return join(self._ranks, self.model, self.flush)
