"""Memory of a training step on a CPU: low copies add gradients in place, and malloc keeps pages."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from halfstep.cast.copies import Copies
from halfstep.events import StepResult
from halfstep.kernels.pages import keep_pages
from halfstep.step.moments import Moments
from halfstep.step.part import Part, Run
from halfstep.step.parts.record import Record

__all__ = ["AddedGradients", "KeptPages"]


class AddedGradients(Part):
    """Low copies of weights add the gradients of a window's later micro-batches to the first one's."""

    def __init__(self, copies: Copies, record: Record) -> None:
        self._copies, self._record = copies, record

    def around_backward(self, loss: Tensor, seed: Tensor, run: Run) -> None:
        """Run the backward pass; from the second micro-batch on, large edges add gradients themselves."""
        if self._record.micro_batches and self._copies.layers:
            self._copies.backward(loss, seed, run)
        else:
            run(loss, seed)


class KeptPages(Part):
    """Has malloc keep the pages of steps on a CPU, from the end of the first update on; note [pages] in `keep_pages`."""

    def __init__(self, owner: object, moments: Moments) -> None:
        self._owner, self._moments = weakref.ref(owner), moments

    def end_call(self, result: StepResult, batch: Any) -> None:
        """Begin after the first update, and be no part any longer."""
        if result.due:
            if result.skipped.device.type == "cpu":
                keep_pages(self._owner())
            self._moments.remove(self)
