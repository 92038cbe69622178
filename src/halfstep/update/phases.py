"""Phases: what the parts of a training step are called in a trace of torch.profiler.

`halfstep::forward` is the forward pass with loss_fn, `halfstep::backward` the scaled backward pass, `halfstep::tail`
the update: norms, unscaling, clipping, optimizer, loss scale. A step asks torch whether a profiler runs; only then
`show_phases` puts functions before its methods, and the first call after the profiler has stopped removes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.autograd.profiler import record_function

from halfstep.torch_private.autograd import profiler_enabled

PHASES = {"run_forward": "halfstep::forward", "run_backward": "halfstep::backward", "_update": "halfstep::tail"}
"""Method of a TrainStep -> its name in traces."""


def show_phases(step: object) -> None:
    """Let the methods of `step` that are phases appear in traces, while a profiler runs."""
    for method in PHASES:
        vars(step).setdefault(method, partial(_traced, weakref.ref(step), method))


def _traced(found: Callable[[], Any], method: str, *args: Any, **named: Any) -> Any:
    step = found()
    run = getattr(type(step), method)
    if profiler_enabled():
        with record_function(PHASES[method]):
            return run(step, *args, **named)
    vars(step).pop(method, None)
    return run(step, *args, **named)
