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

__all__ = ["Unfinished"]


class Unfinished:
    """The gradients that one training step has left for its next micro-batch.

    Args:
        optimizer: whose parameters they belong to; may be assigned between two windows.
        names: id of a parameter -> its name.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer, self._names = optimizer, names
        self._seen: list[tuple[Tensor, Tensor | None, int]] = []

    def note(self) -> None:
        """Note the gradients as they are; torch counts the writes to each."""
        gradients = [(p, p.grad) for group in self.optimizer.param_groups for p in group["params"]]
        self._seen = [(p, grad, 0 if grad is None else grad._version) for p, grad in gradients]

    def check(self) -> None:
        """Compare the gradients with what was noted.

        Raises:
            StepError: one was dropped or written to since.
        """
        for parameter, noted, version in self._seen:
            now = parameter.grad
            if now is not noted or (now is not None and now._version != version):
                raise StepError(
                    f"the gradient of {self._names.get(id(parameter), 'a parameter')} was "
                    f"{'dropped' if now is None else 'written to'} between two micro-batches of a window, outside of "
                    "the step; leave zero_grad(), clipping (clip_norm=) and backward() to the step, and end the window "
                    "of one step before the loss of another runs through its model. The window begins anew"
                )
