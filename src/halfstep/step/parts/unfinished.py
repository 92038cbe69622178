"""The gradients of an unfinished window: noted after a micro-batch, and compared before the next one.

In: the parameters of a step's optimizer. Out: an error if something outside of the step has written to their gradients.
Without it a loop that has kept its `zero_grad` would train on a part of each window, and two steps whose losses run
through one model (a GAN) on each other's gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import StepError
from halfstep.step.part import Part
from halfstep.step.parts.record import Record

__all__ = ["Unfinished"]


class Unfinished(Part):
    """The gradients that one training step has left for its next micro-batch."""

    def __init__(self, optimizer: Optimizer, record: Record, names: Mapping[int, str]) -> None:
        self.optimizer, self._record, self._names = optimizer, record, names
        self._seen: list[tuple[Tensor, Tensor | None, int]] = []

    def end_micro_batch(self, seed: Tensor, *, last: bool) -> None:
        """Note the gradients as they are; torch counts the writes to each."""
        if last:
            return
        gradients = [(p, p.grad) for group in self.optimizer.param_groups for p in group["params"]]
        self._seen = [(p, grad, 0 if grad is None else grad._version) for p, grad in gradients]

    def begin_call(self) -> None:
        """Compare the gradients of a window that has begun with what was noted."""
        for parameter, noted, version in self._seen if self._record.micro_batches else ():
            now = parameter.grad
            if now is not noted or (now is not None and now._version != version):
                raise StepError(
                    f"the gradient of {self._names.get(id(parameter), 'a parameter')} was "
                    f"{'dropped' if now is None else 'written to'} between two micro-batches of a window, outside of "
                    "the step; leave zero_grad(), clipping (clip_norm=) and backward() to the step, and end the window "
                    "of one step before the loss of another runs through its model. The window begins anew"
                )
