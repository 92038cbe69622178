"""What a step remembers of its run, `step.record.signals`: without operators and waits, except at sampled updates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.step.parts.signals import SAMPLED_EVERY, SAMPLES, Signals


def loss_fn(model: nn.Module, x: Tensor) -> Any:
    return model(x).float().square().mean()


def step_of(model: nn.Module | None = None, loss: Any = loss_fn, **settings: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)) if model is None else model
    policy = hs.Policy.of("mixed", dtype="bf16")
    return hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, policy=policy, **settings)


def norm_of(model: nn.Module) -> float:
    return float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"retry": True}, {"update_in_backward": True}])
def test_losses_norms_weights_and_batches_are_those_of_the_run(settings: dict[str, Any]) -> None:
    step = step_of(**settings)
    window = settings.get("accumulate", 1)
    updates, weights, inputs = [], [], []
    for number in range(1, 9 * window + 1):
        x = torch.randn(2, 4) * (math.nan if number == 3 * window else number)
        if (number - 1) % window == 0:
            weights.append((number, norm_of(step.model)))
            inputs.append((number, (float(x.abs().max()),)))
        result = step(x).host()
        if number % window == 0:
            updates.append((number, result.loss, result.grad_norm, not result.skipped))
    found = step.record.signals.read()
    rows = [*zip(found.steps, found.losses, found.gradients, found.applied, strict=True)]
    assert str(rows) == str(updates) and not all(found.applied)  # text: nan is not equal to itself
    sampled = [0, 1, 3, 7]  # updates 1, 2, 4 and 8
    assert dict(found.weights) == pytest.approx(dict(weights[n] for n in sampled), rel=1e-6)
    assert found.inputs == tuple(inputs[n] for n in sampled)
    assert found.updates(until=5 * window) == [row[:3] for row in updates[:4] if row[3]]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.step.parts.signals.UPDATES", 100)
    step = step_of(nn.Linear(2, 1))
    signals, x = step.record.signals, torch.randn(1, 2)
    for _ in range(3 * SAMPLED_EVERY):
        step(x)
    found = signals.read()
    assert found.steps == tuple(range(93, 193))
    assert [number for number, _ in found.weights] == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    for number in range(2 * SAMPLES):
        signals.sample(number, step.model, [x])
    assert len(signals.read().weights) == len(signals.read().inputs) == SAMPLES


def test_a_result_that_its_user_adds_to_is_remembered_as_it_was() -> None:
    step = step_of()
    total = step(torch.ones(2, 4)).loss
    first = float(total)
    total += step(torch.ones(2, 4)).loss
    assert step.record.signals.read().losses[0] == first


def test_a_reference_to_what_was_written_to_since_is_not_known() -> None:
    signals, loss, norm = Signals(), torch.tensor(2.0), torch.tensor(3.0)  # as on a device whose values are not there
    signals.recent.append((1, loss, norm, (loss._version, norm._version), torch.tensor(False), None))
    assert signals.read().losses == (2.0,)
    loss += 1
    assert math.isnan(signals.read().losses[0]) and signals.read().gradients == (3.0,)


def test_a_run_on_a_cpu_keeps_numbers_and_no_tensors() -> None:
    step = step_of(loss=lambda model, x: (model(x).float().square().mean() + torch.zeros(1 << 18))[0])
    result = step(torch.ones(2, 4))
    assert result.loss.untyped_storage().nbytes() == 1 << 20
    ((_, loss, norm, *_, bad, _),) = step.record.signals.recent
    assert (loss, norm, bad) == (float(result.loss), float(result.grad_norm), False)


def test_the_batch_of_a_loss_far_above_those_before_is_sampled() -> None:
    step = step_of()
    for number in range(1, 8):
        step(torch.ones(2, 4) * (100 if number == 6 else 1))
    assert (6, (100.0,)) in step.record.signals.read().inputs


def test_a_loaded_checkpoint_begins_anew() -> None:
    step = step_of()
    step(torch.ones(2, 4))
    state = step.state_dict()
    step(torch.ones(2, 4))
    step.load_state_dict(state)
    assert step.record.signals.read().steps == () and step.record.signals.growth(step.model, 9) is None
    step(torch.ones(2, 4))
    assert step.record.signals.read().steps == (2,) and len(step.record.signals.read().weights) == 1


def test_growth_is_of_the_same_parameters() -> None:
    model, signals = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Signals()
    model[1].requires_grad_(False)
    signals.sample(1, model, [])
    before = norm_of(model[0])
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(3)
    mean = before / math.sqrt(20)
    assert signals.growth(model, 5) == pytest.approx((1, mean, 3 * mean))
    assert signals.growth(model, 0) is None
    model[1].requires_grad_(True)
    assert signals.growth(model, 5) is None


def test_what_is_saved_is_restored() -> None:
    step, other = step_of(), Signals()
    for number in range(1, 6):
        step(torch.ones(2, 4) * (math.nan if number == 3 else number))
    signals = step.record.signals
    other.restore(signals.saved())
    assert str(other.read()) == str(signals.read())  # text: nan is not equal to itself
    assert other.growth(step.model, 4) == signals.growth(step.model, 4)


def test_weights_and_batches_of_any_kind_have_norms() -> None:
    tiny = torch.ones(3).to(torch.float8_e4m3fn)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.full((4,), 40000.0, dtype=torch.float16))  # its norm is beyond fp16
            self.wide = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))
            self.none = nn.Parameter(torch.empty(0))
            self.lazy = nn.LazyLinear(3)
            self.tiny = nn.Parameter(tiny)

    signals = Signals()
    sparse = torch.tensor([2.0, 0.0]).to_sparse()
    signals.sample(1, Odd(), [torch.tensor([-7.0]), torch.tensor([9]), torch.empty(0), sparse, tiny])
    found = signals.read()
    assert dict(found.weights) == pytest.approx({1: math.hypot(80000.0, 6.0)})
    assert str(found.inputs) == "((1, (7.0, nan, nan, nan)),)"


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_only_sampled_updates_run_operators_for_it() -> None:
    step, counts = step_of(), []
    for _ in range(8):
        with Operators() as operators:
            step(torch.ones(2, 4))
        counts.append((len(operators.seen), "aten.linalg_vector_norm.default" in operators.seen))
    usual = counts[2]
    assert not usual[1] and [counts[n] for n in (4, 5, 6)] == [usual] * 3
    assert [n + 1 for n, (_, sampled) in enumerate(counts) if sampled] == [1, 2, 4, 8]
    assert counts[7][0] <= usual[0] + 10
