"""What kernels of a CPU allocate beyond their results is part of a plan's peak, as torch's allocator counts it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import halfstep as hs
from benchmarks.counts import allocations
from halfstep.advise.plan import trace
from tests.products import sampled

CLOSE = 0.02  # of the counted peak: the profiler counts what Python's objects of a step allocate too


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(32, 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(x)[0]
        return found


def encoder() -> nn.Module:
    """Return layers that torch copies from one."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def depthwise() -> nn.Module:
    return nn.Sequential(nn.Conv2d(96, 96, 7, padding=3, groups=96), nn.GELU(), nn.Conv2d(96, 32, 1))


def tower() -> nn.Module:
    block = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(4)))


SLOW = pytest.mark.slow

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: Tagger(nn.LSTM), (32, 8, 32)),
    "gru": (lambda: Tagger(nn.GRU), (32, 8, 32)),
    "encoder": (encoder, (8, 32, 64)),
    "depthwise": (depthwise, (4, 96, 16, 16)),
    "tower": (tower, (256, 64)),
}


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters())


def train(model: Callable[[], nn.Module], shape: tuple[int, ...], policy: hs.Policy) -> Any:
    net, x = model(), torch.randn(shape)
    step = hs.TrainStep(net, adam(net), loss_fn, policy=policy, blackbox=False)
    for _ in range(2):
        step(x)
    return step, x


PAIRS = sampled(MODELS, ("mixed", "O0", "pure"), every=3)


@pytest.mark.parametrize(  # a GRU has five times as many operators
    ("name", "policy"),
    [pytest.param(*p.values, marks=[*p.marks, SLOW] if "gru" in p.values else p.marks) for p in PAIRS],
)
def test_the_planned_peak_is_the_counted_one(name: str, policy: str) -> None:
    model, shape = MODELS[name]
    chosen = hs.Policy.of(policy) if policy == "O0" else hs.Policy.of(policy, dtype="bf16")
    train(model, shape, chosen)  # torch's caches fill
    _, counted = allocations(lambda: train(model, shape, chosen))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = hs.plan(model, (torch.empty(shape),), loss_fn, adam, policy=chosen, device="cpu")
    assert plan.peak_bytes == pytest.approx(counted, rel=CLOSE)


def test_a_large_convolution_is_run_on_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for largest in (1 << 30, 1 << 22):  # all samples and, as torch chooses kernels by their number, at least 16 of 64
        monkeypatch.setattr(trace, "LARGEST_KERNEL", largest)
        monkeypatch.setattr(trace, "_KNOWN", {})
        plan = hs.plan(depthwise, (torch.empty(64, 96, 16, 16),), loss_fn, adam, policy="O0", device="cpu")
        peaks.append(plan.peak_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


def test_under_a_profiler_no_workspace_is_counted_and_a_note_says_so() -> None:
    given: Any = (MODELS["lstm"][0], (torch.empty(32, 8, 32),), loss_fn, adam)
    with profile():
        under = hs.plan(*given, policy="O0", device="cpu")
    plan = hs.plan(*given, policy="O0", device="cpu")
    assert under.peak_bytes < plan.peak_bytes
    assert any("profiler" in note for note in under.notes) and not plan.notes
