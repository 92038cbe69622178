"""hs.warm: it launches what a step launches, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import HalfstepError
from halfstep.kernels import ops
from halfstep.kernels.choose import load_kernels
from halfstep.kernels.optimizers import SPECS
from halfstep.update import fused

REASON = load_kernels("cpu")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Lion": lambda p: hs.Lion(p, lr=1e-3),
}
CASES = [
    ("mixed", {"dtype": "bf16"}, "AdamW", 1.0),
    ("mixed", {"dtype": "fp16"}, "SGD", None),
    ("O2", {"dtype": "fp16"}, "AdamW", 1.0),
    ("O2", {"dtype": "bf16", "grads": "fp32"}, "NAdam", None),
    ("pure", {"dtype": "bf16", "master": "split"}, "Lion", 1.0),
    ("pure", {"dtype": "bf16", "master": "kahan"}, "AdamW", None),
    ("lean", {"dtype": "bf16"}, "AdamW", 1.0),
]


def made(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 96), nn.LayerNorm(96), nn.Dropout(0.1), nn.Linear(96, 4))
    return model, OPTIMIZERS[optimizer](model.parameters())


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any, policy: hs.Policy, clip: float | None, calls: int = 3) -> hs.TrainStep:
    step = hs.TrainStep(model, optimizer, loss_fn, policy=policy, clip_norm=clip)
    generator = torch.Generator().manual_seed(1)
    for _ in range(calls):
        step(torch.randn(8, 16, generator=generator))
    return step


@contextmanager
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Let every operator of an update also launch its Triton kernels, which are noted; yield the set of them."""
    from halfstep.kernels.triton import norms, updates
    from tests.kernels.launched import launched

    def both(launch: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            launch(*given)
            return operator(*given)

        return call

    with monkeypatch.context() as patch, launched() as found:
        for name, launch in (("norms", norms.norms), ("check_norms", norms.check_norms), ("advance_", norms.advance_)):
            patch.setattr(ops, name, both(launch, getattr(ops, name)))
        all_updates = {s.name: both(partial(updates.update, s), ops.UPDATES[s.name]) for s in SPECS}
        patch.setattr(ops, "UPDATES", MappingProxyType(all_updates))
        patch.setattr(fused, "native_kernels", lambda tensor: None)  # which would be called without the operators
        yield found


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize(("preset", "fields", "optimizer", "clip"), CASES)
def test_it_compiles_what_a_step_launches_and_no_other_kernel(
    preset: str, fields: Any, optimizer: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = hs.Policy.of(preset, **fields)
    with on_triton(monkeypatch) as warmed:
        model, stepped = made(optimizer)
        hs.warm(model, stepped, policy, clip_norm=clip)
        warmed = set(warmed)
    with on_triton(monkeypatch) as launched:
        train(*made(optimizer), policy, clip)
        launched = set(launched)
    assert warmed == launched and len(warmed) >= 4
    kernels = {name for name, _ in warmed}
    assert {"squares_kernel", "norms_kernel", "check_kernel", "update_kernel"} <= kernels
    assert ("advance_kernel" in kernels) == (policy.dtype == "fp16")


@pytest.mark.parametrize(("preset", "fields", "optimizer", "clip"), CASES)
def test_it_changes_no_bit(preset: str, fields: Any, optimizer: str, clip: float | None) -> None:
    policy = hs.Policy.of(preset, **fields)
    ends = []
    for warms in (False, True):
        model, stepped = made(optimizer)
        hs.prepare(model, stepped, policy=policy)
        if warms:
            before = copy.deepcopy(stepped.state_dict()["state"]), torch.get_rng_state()
            seconds = hs.warm(model, stepped, policy, clip_norm=clip)
            assert all(value >= 0 for value in seconds.values()) and "load" in seconds
            assert stepped.state_dict()["state"] == before[0] == {} and torch.equal(torch.get_rng_state(), before[1])
            assert all(parameter.grad is None for parameter in model.parameters())
        torch.manual_seed(2)
        step = train(model, stepped, policy, clip)
        ends.append((repr(step.state_dict()), step.scaler.get_scale()))
    assert ends[0] == ends[1]


def test_it_says_how_long_it_took_and_a_second_call_does_it_again() -> None:
    model, optimizer = made("AdamW")
    policy = hs.Policy.of("O2", dtype="fp16")
    first, second = hs.warm(model, optimizer, policy), hs.warm(model, optimizer)
    assert list(first) == list(second)
    assert set(first) in ({"load"}, {"load", "update"})


def test_an_update_that_runs_out_of_memory_leaves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused.FusedUpdate, "write", fails)
    model, optimizer = made("AdamW")
    with pytest.raises(torch.OutOfMemoryError) if not REASON else nullcontext():
        hs.warm(model, optimizer, "mixed")
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())


def test_what_has_not_chosen_is_refused() -> None:
    with pytest.raises(HalfstepError, match="policy='auto' chooses in the first call"):
        hs.warm(*made("AdamW"), "auto")
