"""TrainStep(retry=...): an overflowed window runs again, bit-equal to a run that comes to it at the scale that fits."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.errors import StepError
from halfstep.step.retry import ENOUGH
from halfstep.step.undo import Marks
from tests.step.cutting import Knife, plain, plain_copy
from tests.two_processes import in_two_processes

Batch = tuple[Tensor, Tensor, Tensor]
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
}
POLICIES: dict[str, hs.Policy] = {
    "mixed": hs.Policy.of("mixed", dtype="fp16"),
    "torch": hs.Policy.of("torch", dtype="fp16"),
    "O2": hs.Policy.of("O2", dtype="fp16"),
    "O2, none": hs.Policy.of("O2", dtype="fp16", master="none"),
    "O2, sums": hs.Policy.of("O2", dtype="fp16", grads="fp32"),
    "kahan": hs.Policy.of("O2", dtype="fp16", master="kahan"),
    "stochastic": hs.Policy.of("O2", dtype="fp16", master="stochastic"),
    "split": hs.Policy.of("O2", dtype="bf16", master="split"),
    "pure": hs.Policy.of("pure", dtype="bf16"),
}
LIMIT = 2.0**10


class Limited(torch.autograd.Function):
    """The identity, with a gradient of inf from `LIMIT` on: an overflow that is the same in every format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(gradient.abs() >= LIMIT, gradient * float("inf"), gradient)


class Restless(nn.Module):
    """Everything that a forward pass changes: every kind of generator, buffers in place and replaced."""

    ahead: Tensor
    mean: Tensor
    running_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ahead", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("running_mean", torch.zeros(()))  # a name of BatchNorm's in a module of another kind
        self.register_buffer("table", torch.arange(16.0))
        self.draws = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.ahead = self.ahead + 1
        self.running_mean.add_(1)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        noise = torch.rand((), generator=self.draws) + random.random() + float(np.random.rand())
        return x + 0.01 * (self.mean + noise).to(x.dtype)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), Restless(), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3)
    )


def loss_fn(model: nn.Module, x: Tensor, y: Tensor, height: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss whose gradient overflows from the scale 2**(16 - height) on, about."""
    outputs = Limited.apply(model(x).float()) * (torch.arange(3.0) == y[:, None]) * torch.exp2(height - 6.0)
    return outputs.sum(), outputs.detach()


def batch(number: int, height: float) -> Batch:
    generator = torch.Generator().manual_seed(50 + number)
    x = torch.randn(6, 8, generator=generator)
    return x, torch.randint(0, 3, (6,), generator=generator), torch.tensor(height)


def stepper(
    policy: str = "mixed", optimizer: str = "adamw", *, rule: hs.ScaleRule | None = None, **options: Any
) -> hs.TrainStep:
    random.seed(1), np.random.seed(1)
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    options = {"scheduler": schedule, "scaler": hs.GradScaler(rule=rule or hs.ScaleRule()), **options}
    step = hs.TrainStep(model, made, loss_fn, policy=POLICIES[policy], **options)
    torch.manual_seed(2)
    return step


def generators(step: hs.TrainStep) -> list[Any]:
    own = [m.draws for m in step.model.modules() if isinstance(m, Restless)]
    states = [torch.default_generator.get_state().clone(), *[g.get_state().clone() for g in own]]
    return [*states, random.getstate(), np.random.get_state()]


def put_generators(step: hs.TrainStep, states: list[Any]) -> None:
    (own,) = [m.draws for m in step.model.modules() if isinstance(m, Restless)]
    torch.default_generator.set_state(states[0]), own.set_state(states[1])
    random.setstate(states[2]), np.random.set_state(states[3])


def outcome(result: hs.StepResult) -> list[Any]:
    host = result.host()
    return [host.step, repr(host.loss), host.scale, host.updated, host.skipped, repr(host.grad_norm), plain(result.aux)]


def window_of(heights: Sequence[float], accumulate: int) -> Iterator[list[Batch]]:
    for start in range(0, len(heights), accumulate):
        yield [batch(i, heights[i]) for i in range(start, start + accumulate)]


def retried(step: hs.TrainStep, windows: Iterator[list[Batch]]) -> tuple[list[Any], list[int], list[Any]]:
    """Return what the updates gave, how often they were retried, and the state that is left."""
    outcomes, retries = [], []
    for window in windows:
        result = [step(*micro) for micro in window][-1]
        outcomes.append(outcome(result))
        retries.append(result.retries)
    return outcomes, retries, [plain(step.state_dict()), plain(generators(step))]


def restarted(step: hs.TrainStep, windows: Iterator[list[Batch]], most: int) -> tuple[list[Any], list[int], list[Any]]:
    """The same by checkpoints: a run goes back to the one before a bad update and comes to it at the next scale."""
    outcomes, retries = [], []
    for window in windows:
        before, chance = plain_copy(step.state_dict()), generators(step)
        first: tuple[Any, ...] | None = None
        for attempt in range(most + 1):
            results = [step(*micro) for micro in window]
            result = results[-1]
            first = first or (plain_copy(step.state_dict()), generators(step))
            if not result.skipped:
                break
            while step.scaler.get_scale() >= float(result.scale) > step.scaler.rule.floor:  # hysteresis
                step.scaler.record(torch.tensor(True))
                step.scaler.update()
            hopeless = not all(r.loss.isfinite() for r in results) or float(result.scale) <= step.scaler.rule.floor
            if attempt == most or hopeless:
                step.load_state_dict(first[0])  # skipped, as without retry
                put_generators(step, first[1])
                break
            step.load_state_dict({**before, "scaler": step.scaler.state_dict()})
            put_generators(step, chance)
        outcomes.append(outcome(result))
        retries.append(attempt)
    return outcomes, retries, [plain(step.state_dict()), plain(generators(step))]


CASES = [
    *[(policy, "adamw", 1) for policy in POLICIES],
    *[(policy, "rmsprop", 2) for policy in POLICIES if policy != "O2, none"],  # its eps is 0 in fp16
    ("O2, none", "sgd", 2),
    ("mixed", "sgd", 3),
    ("O2, sums", "sgd", 3),
]
HEIGHTS = (3.0, 0.0, 6.0, 2.0, 8.0, 7.0, 0.0, 1.0, 9.0, 9.0, 1.0, 1.0)


@pytest.mark.parametrize(("policy", "optimizer", "accumulate"), CASES)
def test_a_retried_run_is_the_one_that_comes_to_each_update_at_the_scale_that_fits(
    policy: str, optimizer: str, accumulate: int
) -> None:
    options = {"accumulate": accumulate, "clip_norm": 1.0, "rule": hs.ScaleRule(interval=2), "blackbox": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = retried(stepper(policy, optimizer, retry=True, **options), window_of(HEIGHTS, accumulate))
        right = restarted(stepper(policy, optimizer, **options), window_of(HEIGHTS, accumulate), ENOUGH)
    assert got == right
    assert sum(got[1]) > 4 and all(updated for _, _, _, updated, *_ in got[0])


RULES = {
    "halfstep": hs.ScaleRule(interval=2),
    "hysteresis": hs.ScaleRule(interval=3, hysteresis=2),
    "low": hs.ScaleRule(init=2.0**6, floor=2.0**3),
    "thirds": hs.ScaleRule(backoff=1 / 3, growth=3.0, interval=2),
}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    heights=st.lists(st.sampled_from([0.0, 2.0, 5.0, 9.0, 12.0, 16.0, 23.0, float("nan")]), min_size=6, max_size=6),
    accumulate=st.sampled_from([1, 2]),
    most=st.sampled_from([1, 2, 16]),
    rule=st.sampled_from(sorted(RULES)),
    policy=st.sampled_from(["mixed", "stochastic"]),
)
def test_any_overflows(heights: list[float], accumulate: int, most: int, rule: str, policy: str) -> None:
    options = {"accumulate": accumulate, "rule": RULES[rule], "blackbox": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scale is at its floor
        got = retried(stepper(policy, retry=most, **options), window_of(heights, accumulate))
        right = restarted(stepper(policy, **options), window_of(heights, accumulate), most)
    assert got == right
