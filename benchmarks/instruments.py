"""Loops with instruments: halfstep's black box and monitor, and what people use without them.

Two loops are the ground: `hs.TrainStep` without its black box, and torch.amp. An instrument is compared with the ground
it stands on, so that neither pays for the other's loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfstep as hs
from benchmarks.cases import AGAIN, AMP, Batch, Case
from benchmarks.loops import CLIP, Run, adamw, amp, device_of, policy
from benchmarks.turns import Track
from halfstep.timing import Ratio, paired_ratio

OFF, OFF_AGAIN, ON = "TrainStep, black box off", "TrainStep, black box off again", "TrainStep, black box on"
SAMPLING, BETWEEN = "Monitor: a step with a sample", "Monitor: a step without one"
BOXED, ANOMALY, HOOKS = "torch.amp in hs.BlackBox", "torch.amp under detect_anomaly", "torch.amp, hooks on modules"
NEVER = 10**9  # steps between samples

BASELINES: Mapping[str, str] = {
    **dict.fromkeys((OFF_AGAIN, ON, SAMPLING, BETWEEN), OFF),
    **dict.fromkeys((AGAIN, BOXED, ANOMALY, HOOKS), AMP),
}
"""What each is compared with."""

LABELS = (OFF, OFF_AGAIN, ON, SAMPLING, BETWEEN, AMP, AGAIN, BOXED, ANOMALY, HOOKS)


class NotFinite(Exception):
    """A hook saw a tensor that is not finite; the message names the module."""

    def __init__(self, module: str, what: str) -> None:
        super().__init__(f"{what} of module {module!r} is not finite")
        self.module = module


class CheckEveryOperator(TorchDispatchMode):
    """Raises `FloatingPointError` with the name of the first operator that makes a non-finite result of finite numbers.

    Memory that is not written yet and constants of inf are no result.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "empty" not in name and not _finite(result) and _finite((args, kwargs)):
            raise FloatingPointError(name)
        return result


def _finite(value: Any) -> bool:
    numbers = [part for part in tree_leaves(value) if isinstance(part, float)]
    tensors = [part for part in tree_leaves(value) if isinstance(part, Tensor) and part.is_floating_point()]
    return all(map(math.isfinite, numbers)) and all(bool(t.isfinite().all()) for t in tensors)


def monitored(case: Case, model: nn.Module, *, every: int) -> Run:
    """hs.TrainStep under `mixed`, without black box, watched by hs.Monitor, whose records are read as they come."""
    run = policy(case, model, "mixed", blackbox=False)
    train: Any = run.holds[0]
    monitor = hs.Monitor(train, every=every)

    def step(batch: Batch) -> Tensor:
        loss = run.step(batch)
        monitor.poll()
        return loss

    return replace(run, step=step, holds=(train, monitor))


def boxed(case: Case, model: nn.Module) -> Run:
    """The loop of torch.amp in bf16, its forward pass and loss called by hs.BlackBox."""
    device, optimizer, parameters = device_of(model), adamw(case, model), list(model.parameters())

    def forward(model: nn.Module, *batch: Tensor) -> Tensor:
        with torch.autocast(device, dtype=case.low):
            return case.loss_fn(model, *batch)

    box = hs.BlackBox(model, forward, optimizer)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = box(*batch)
        loss.backward()
        clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Run(step=step, model=model, holds=(model, optimizer, box), stages=None)


def anomalous(case: Case, model: nn.Module) -> Run:
    """The loop of torch.amp under torch's anomaly mode."""
    run = amp(case, model)

    def step(batch: Batch) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            return run.step(batch)

    return replace(run, step=step)


def hooked(case: Case, model: nn.Module) -> Run:
    """The loop of torch.amp with a check on every module, as it is passed around in forums."""
    watch_modules(model)
    return amp(case, model)


def watch_modules(model: nn.Module) -> None:
    """Put hooks on every module that raise `NotFinite` if an output or a gradient, in or out, is not finite."""
    for name, module in model.named_modules():
        module.register_forward_hook(partial(_after_forward, name))
        module.register_full_backward_hook(partial(_after_backward, name))


def _after_forward(name: str, module: nn.Module, args: Any, output: Any) -> None:
    _check(name, "an output", output)


def _after_backward(name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    _check(name, "a gradient", (grad_input, grad_output))


def _check(name: str, what: str, value: Any) -> None:
    for tensor in _tensors(value):
        if not torch.isfinite(tensor).all():
            raise NotFinite(name, what)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


LOOPS: Mapping[str, Callable[[Case, nn.Module], Run]] = {
    OFF: partial(policy, preset="mixed", blackbox=False),
    OFF_AGAIN: partial(policy, preset="mixed", blackbox=False),
    ON: partial(policy, preset="mixed", blackbox=True),
    SAMPLING: partial(monitored, every=1),
    BETWEEN: partial(monitored, every=NEVER),
    BOXED: boxed,
    ANOMALY: anomalous,
    HOOKS: hooked,
}


def sampled(sampling: Track, between: Track, plain: Track, every: int) -> Ratio:
    """Return what a step takes on average under a monitor, over a plain step.

    A long run would show it, but few of its steps hold a sample. So steps with and without one are timed in every
    round, and weighed: one of the former to ``every - 1`` of the latter.
    """
    rounds = sorted(sampling.seconds.keys() & between.seconds.keys() & plain.seconds.keys())
    mixed = [(sampling.seconds[i] + (every - 1) * between.seconds[i]) / every for i in rounds]
    return paired_ratio(mixed, [plain.seconds[i] for i in rounds])
