"""Phases: what the parts of a training step are called in a trace of torch.profiler.

`halfstep::forward` is the forward pass with loss_fn, `halfstep::backward` the scaled backward pass, `halfstep::tail`
the update: norms, unscaling, clipping, optimizer, loss scale. A step asks torch whether a profiler runs; only then
`show_phases` puts functions before its methods, and the first call after the profiler has stopped removes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function

from halfstep.torch_private.autograd import profiler_enabled

__all__ = ["PHASES", "profiler_runs", "show_phases"]

profiler_runs: Callable[[], bool] = profiler_enabled
"""Return whether a profiler of torch records; a function of C."""

PHASES = {"run_forward": "halfstep::forward", "run_backward": "halfstep::backward", "_update": "halfstep::tail"}
"""Method of a TrainStep -> its name in traces."""


def show_phases(step: object) -> None:
    """Let the methods of `step` that are phases appear in traces, while a profiler runs."""
    for method in PHASES:
        vars(step).setdefault(method, _Phase(step, method))


class _Phase:
    """One method of a step, under its name in traces; it holds no reference to the step."""

    def __init__(self, step: object, method: str) -> None:
        self._step, self._method = weakref.ref(step), method

    def __call__(self, *args: Any, **named: Any) -> Any:
        step = self._step()
        run = getattr(type(step), self._method)
        if profiler_runs():
            with record_function(PHASES[self._method]):
                return run(step, *args, **named)
        vars(step).pop(self._method, None)
        return run(step, *args, **named)
