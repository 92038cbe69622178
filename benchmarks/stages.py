"""Stages of a step: forward, backward, tail; and the weights whose low copies the next forward pass makes anew.

The tail is everything after the backward pass: unscaling, clipping, the optimizer, writing low weights. A hook on the
loss asks the autograd engine to call back when backward is over, so that it is measured inside whole training steps of
every candidate alike, its caches and its memory as they are in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.timing import wait_for

LossFn = Callable[..., Tensor]


@dataclass(slots=True)
class Stages:
    """Watches the steps of one run while `on`; a flag to read otherwise.

    Attributes:
        device: its type; on a GPU each stage ends with a wait, so that only steps watched for stages are slowed.
        on: whether to take times.
        stage: where the step is: "forward", "backward" or "tail".
        marks: seconds at which stages began; the first is that of the step.
        around: what is open during the forward pass of a watched step.
    """

    device: str
    on: bool = False
    stage: str = "forward"
    marks: tuple[float, ...] = ()
    around: AbstractContextManager[Any] = nullcontext()

    def watched(self, loss_fn: LossFn) -> LossFn:
        """Return `loss_fn` with the stages of the steps that it is called in."""

        def loss(model: Any, *batch: Any) -> Tensor:
            if not self.on:
                return loss_fn(model, *batch)
            with self.around:
                made = loss_fn(model, *batch)
            self._begin("backward")
            made.register_hook(self._in_backward)
            return made

        return loss

    def _in_backward(self, gradient: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._begin("tail"))

    def _begin(self, stage: str) -> None:
        wait_for(self.device)
        self.stage, self.marks = stage, (*self.marks, time.perf_counter())

    def run(self, step: Callable[[], Any]) -> tuple[float, float, float]:
        """Run `step` once; return the seconds of forward, backward and tail.

        Raises:
            RuntimeError: the step did not come by the loss function, or by a backward pass from it.
        """
        self._reset()
        try:
            self._begin("forward")
            step()
            self._begin("forward")
        finally:
            self.on = False
        if len(self.marks) != 4:
            raise RuntimeError(
                f"a step has one forward and one backward pass; this one left {len(self.marks)} marks, not 4"
            )
        start, forward, backward, end = self.marks
        return forward - start, backward - forward, end - backward

    def _reset(self) -> None:
        self.on, self.marks = True, ()


def recast(casts: list[tuple[Tensor, Tensor | None, torch.dtype]], device: str) -> float:
    """Make low copies of weights as a forward pass was seen to make them; return the seconds.

    Args:
        casts: a weight, the tensor its copy was written into (None: a new one), and the copy's format.
        device: its type.
    """
    kept = []  # as autocast's cache keeps them until its region ends
    wait_for(device)
    start = time.perf_counter()
    for weight, target, dtype in casts:
        kept.append(weight.detach().to(dtype) if target is None else target.copy_(weight.detach()))
    wait_for(device)
    return time.perf_counter() - start
