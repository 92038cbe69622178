"""hs.warm: what compiles or loads the kernels of an update before the first step."""

import logging
import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.kernels.choose import why_no_kernels
from halfstep.kernels.sharded import local
from halfstep.policy.policy import Policy
from halfstep.snapshot import Snapshot, optimizer_state
from halfstep.step.parts.signals import Weights
from halfstep.step.train_step import TrainStep

LOG = logging.getLogger("halfstep")


def warm(
    model: nn.Module, optimizer: Optimizer, policy: Policy | str | Path | None = None, *, clip_norm: float | None = None
) -> dict[str, float]:
    """Compile or load the kernels of an update before the first step; return how many seconds it took.

    On CUDA these are Triton's kernels for the formats of these parameters, on a CPU the native extension. It prepares
    what is not prepared, as `TrainStep`, and makes an update whose gradients are infinite, which writes nothing: no
    weight, optimizer state or random state is another one afterwards; gradients are None. Memory for gradients and
    optimizer states is taken meanwhile. Kernels of a loss depend on the batch, and are compiled in its first call. On
    several ranks all of them call it.

    Args:
        model: as `TrainStep` takes it.
        optimizer: a torch optimizer over the model's parameters.
        policy: preset name, TOML path or Policy; default: what the model was prepared with, else "mixed".
        clip_norm: as the step will have it: clipping is a kernel of its own.

    Returns:
        "load" and "update" -> seconds of the host; "load" alone where no kernels run.

    Raises:
        StepError, BindError, PolicyError, UnbuiltError: as `TrainStep`; policy="auto" has not chosen yet.

    Examples:
        >>> seconds = hs.warm(model, optimizer, "mixed", clip_norm=1.0)
    """
    step = TrainStep(model, optimizer, lambda *batch: None, policy=policy, clip_norm=clip_norm, blackbox=False)
    parameters = [p for group in step.optimizer.param_groups for p in group["params"] if p.requires_grad]
    step.parts  # noqa: B018  # policy="auto" has none before its first call
    begun = time.perf_counter()
    reason = why_no_kernels(local(parameters[0]))
    loaded = time.perf_counter()
    seconds = {"load": loaded - begun}
    if not reason:
        drop = step._updater.begin_window
        drop()
        with Snapshot(optimizer_state(step.optimizer), drop).returning():
            for parameter in parameters:
                dtype = parameter.grad_dtype or parameter.dtype
                parameter.grad = torch.full_like(parameter.detach(), math.inf, dtype=dtype)
            step._update(step.accumulate)
            Weights.of(model)  # what the step looks at now and then
        seconds["update"] = time.perf_counter() - loaded
    LOG.info("hs.warm: %s", ", ".join(f"{name} took {one:.3f} s" for name, one in seconds.items()))
    return seconds
