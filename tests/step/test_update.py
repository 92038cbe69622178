"""halfstep's own update: the same training as through the optimizer's own step, and who is stepped that way."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.binding.prepare import store_of
from halfstep.kernels.choose import cannot_update
from halfstep.kernels.reference.operators import split_bf16
from halfstep.update.fused import FusedUpdate
from halfstep.weights.strategies import SplitWeights
from tests.products import sampled
from tests.stepping import own_step

pytestmark = pytest.mark.skipif(bool(cannot_update([torch.zeros(1)])), reason=cannot_update([torch.zeros(1)]))

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "lion": lambda p: hs.Lion(p, 1e-3, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "coupled nadam": lambda p: torch.optim.NAdam(p, 1e-2, weight_decay=0.1, momentum_decay=0.1, maximize=True),
    "maximize": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, maximize=True),
}
POLICIES = {
    "mixed": hs.Policy.of("mixed", dtype="bf16"),
    "master": hs.Policy.of("O2", dtype="bf16", master="master"),
    "master-fp16": hs.Policy.of("O2", dtype="fp16", master="master"),
    "split": hs.Policy.of("O2", dtype="bf16", master="split"),
    "kahan": hs.Policy.of("pure", dtype="bf16", master="kahan"),
    "fp32 gradients": hs.Policy.of("O2", dtype="bf16", master="split", grads="fp32"),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 16), nn.ReLU(), nn.Linear(16, 3))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50 + i)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def stepper(policy: hs.Policy, make: Make, **options: Any) -> hs.TrainStep:
    model = net()
    return hs.TrainStep(model, make(model.parameters()), loss_fn, policy=policy, **options)


def values(step: hs.TrainStep) -> dict[str, Tensor]:
    """Return precise weights, low weights and optimizer states."""
    found = {
        **step.model.state_dict(),
        **{f"low {n}": Tensor.detach(p).clone() for n, p in step.model.named_parameters()},
    }
    for i, state in step.optimizer.state_dict()["state"].items():
        found |= {f"{i} {name}": torch.as_tensor(value) for name, value in state.items() if value is not None}
    return found


@contextmanager
def generically(step: hs.TrainStep) -> Iterator[None]:
    """Run `step` without halfstep's own update."""
    handle = own_step(step.optimizer)
    yield
    handle.remove()


@pytest.mark.parametrize(("policy", "name"), sampled(POLICIES, OPTIMIZERS))
def test_it_trains_as_the_optimizers_own_step_does(policy: str, name: str) -> None:
    """From the same state, one step made both ways: fp32 values agree to 4 ulps of what took part in the step.

    Under kahan a value has 16 bits, and one that lies between two of them may go to either.
    """
    step = stepper(POLICIES[policy], OPTIMIZERS[name], clip_norm=0.5)
    for i in range(3):
        step(*batch(i))
        assert step.generic == ""
    for i in range(3, 9):
        other = copy.deepcopy(step)
        mine = step(*batch(i))
        with generically(other):
            other(*batch(i))
        assert step.generic == "" and "hooks" in other.generic
        assert torch.equal(mine.loss, mine.loss) and bool(mine.updated)
        want = values(other)
        for key, value in values(step).items():
            bound = 4 * 2.0**-23 if value.dtype is torch.float32 else torch.finfo(value.dtype).eps
            bound = max(bound, 2.0**-16) if policy == "kahan" and key in step.model.state_dict() else bound
            largest = float(want[key].abs().max())
            assert float((value.float() - want[key].float()).abs().max()) <= bound * largest, key


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        pytest.param("lion", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.hours) for name in ("nesterov", "nadam")),
    ],
)
def test_split_weights_are_the_fp32_ones_in_two_halves_for_5000_steps(name: str) -> None:
    """The same update on fp32 weights, from the same gradients; the model's weights are their upper halves."""
    wide = nn.Parameter(torch.randn(300, generator=torch.Generator().manual_seed(1)))
    low = nn.Parameter(wide.detach().clone())
    optimizers = [OPTIMIZERS[name]([p]) for p in (wide, low)]
    store = SplitWeights([("p", low)], torch.bfloat16)
    store.attach(optimizers[1])
    target = torch.randn(300, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(5_000, generator=torch.Generator().manual_seed(3)).tolist()
    one, good = torch.ones(()), torch.zeros((), dtype=torch.bool)
    for factor in noise:
        gradient = (low.detach() - target).mul_(1 + 0.5 * factor).to(torch.bfloat16)
        wide.grad, low.grad = gradient.float(), gradient
        FusedUpdate(optimizers[0], None, None, [wide], [wide.grad]).write(one, good)
        FusedUpdate(optimizers[1], store, None, [low], [low.grad]).write(one, good)
    assert torch.equal(store.read(low), wide.detach())
    assert torch.equal(low.detach(), split_bf16(wide.detach())[0])


@pytest.mark.parametrize("state", ["fp32", "low"])
@pytest.mark.parametrize("master", ["master", "split", "kahan", "stochastic"])
def test_lion_is_bit_equal_either_way(master: str, state: Any) -> None:
    """Its generic form is the reference, and random bits are the same whichever way a step is made."""
    policy = hs.Policy.of("pure", dtype="bf16", master=master, state=state)
    step, other = (stepper(policy, OPTIMIZERS["lion"]) for _ in range(2))

    def three(step: hs.TrainStep, start: int) -> None:
        for i in range(start, start + 3):
            step(*batch(i))

    three(step, 0)
    with generically(other):
        three(other, 0)
    with generically(step):
        three(step, 3)
    three(other, 3)
    assert "hooks" in step.generic and other.generic == ""
    mine, theirs = values(step), values(other)
    assert all(torch.equal(value, theirs[key]) for key, value in mine.items())


@pytest.mark.parametrize("policy", [*POLICIES, "stochastic", "lean"])
@pytest.mark.parametrize("name", ["adamw", "nesterov", "lion", "nadam"])
def test_a_bad_step_leaves_no_trace(policy: str, name: str) -> None:
    extra = {
        "stochastic": hs.Policy.of("pure", dtype="bf16", master="stochastic"),
        "lean": hs.Policy.of("lean", dtype="bf16"),
    }
    step = stepper((POLICIES | extra)[policy], OPTIMIZERS[name], blackbox=name == "adamw")
    for i in range(2):
        step(*batch(i))
    before = copy.deepcopy(values(step))
    x, y = batch(2)
    result = step(x * math.inf, y)
    assert bool(result.skipped) and len(result.culprits) > 0 and step.generic == ""
    after = values(step)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert bool(step(*batch(3)).updated)


@pytest.mark.parametrize("master", ["split", "kahan", "stochastic"])
def test_low_states_are_bf16_and_a_resumed_run_goes_on_bit_for_bit(master: str) -> None:
    policy = hs.Policy.of("pure", dtype="bf16", master=master, state="low")
    step = stepper(policy, OPTIMIZERS["adamw"])
    for i in range(4):
        step(*batch(i))
    states = [v for s in step.optimizer.state.values() for k, v in s.items() if k != "step"]
    assert states and all(v.dtype is torch.bfloat16 for v in states)
    again = stepper(policy, OPTIMIZERS["adamw"])
    again.load_state_dict(copy.deepcopy(step.state_dict()))
    copied = copy.deepcopy(step)
    for i in range(4, 8):
        assert torch.equal(step(*batch(i)).loss, again(*batch(i)).loss)
        copied(*batch(i))
    want = values(step)
    assert all(torch.equal(value, want[key]) for key, value in values(again).items())
    assert all(torch.equal(value, want[key]) for key, value in values(copied).items())


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_autograd_notices_that_weights_have_changed(name: str) -> None:
    """A graph from before an update must not be run through weights from after it."""
    step = stepper(POLICIES["split"], OPTIMIZERS[name])
    model = step.model
    late = loss_fn(model, *batch(0))
    step(*batch(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_a_weight_changed_by_hand_is_what_the_next_step_starts_from() -> None:
    step = stepper(POLICIES["master"], OPTIMIZERS["sgd"])
    step(*batch(0))
    weight = next(step.model.parameters())
    with torch.no_grad():
        weight.fill_(3.0)
    step(*batch(1))
    store = store_of(step.model)
    assert store is not None and bool(((store.read(weight) - 3).abs() < 0.5).all())


def test_schedulers_are_content_and_learning_rates_may_be_tensors() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=POLICIES["split"], scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            step(*batch(i))
        step.flush()
    assert step.generic == "" and math.isclose(float(optimizer.param_groups[0]["lr"]), 1e-5, rel_tol=1e-5)


def hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


class Special(torch.optim.AdamW):
    """Somebody's own."""


REFUSED: dict[str, tuple[Make, str]] = {
    "another optimizer": (
        lambda p: torch.optim.RMSprop(p, 1e-3),
        "RMSprop is none of Adam, AdamW, SGD, Lion and NAdam",
    ),
    "a subclass": (lambda p: Special(p, 1e-3), "Special is none of"),
    "amsgrad": (lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True), "amsgrad=True"),
    "a form that was chosen": (lambda p: torch.optim.AdamW(p, 1e-3, foreach=True), "foreach=True"),
    "the loop": (lambda p: torch.optim.AdamW(p, 1e-3, foreach=False, fused=False), "fused=False"),
    "dampening": (lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, dampening=0.1), "dampening=0.1"),
    "hooks": (lambda p: hooked(torch.optim.AdamW(p, 1e-3)), "hooks that run before or after its step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_know_goes_the_generic_way_and_says_so(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = REFUSED[case]
    step = stepper(POLICIES["split"], make)
    with caplog.at_level("DEBUG", logger="halfstep"):
        assert bool(step(*batch(0)).updated) and bool(step(*batch(1)).updated)
    assert reason in step.generic
    assert sum(reason in record.message for record in caplog.records) == 1


def test_low_weights_with_nothing_behind_them_are_torchs_affair() -> None:
    step = stepper(hs.Policy.of("O3", dtype="bf16"), OPTIMIZERS["adamw"])
    step(*batch(0))
    assert "has no fp32 value" in step.generic
    assert all(v.dtype is torch.bfloat16 for s in step.optimizer.state.values() for k, v in s.items() if k != "step")


def test_auto_is_split_where_one_pass_updates_bf16_weights() -> None:
    auto = hs.Policy.of("O2", dtype="bf16")
    assert stepper(auto, OPTIMIZERS["adamw"]).policy.master == "split"
    assert stepper(auto, REFUSED["another optimizer"][0]).policy.master == "master"
    assert stepper(auto, OPTIMIZERS["adamw"], clip_value=1.0).policy.master == "master"
    assert stepper(hs.Policy.of("O2", dtype="fp16"), OPTIMIZERS["adamw"]).policy.master == "master"
    first, second = stepper(auto, OPTIMIZERS["adamw"]), stepper(auto, OPTIMIZERS["adamw"], clip_value=1e9)
    first(*batch(0))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    a, b = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_clipping_by_value_and_held_fp32_values_go_the_generic_way() -> None:
    step = stepper(POLICIES["split"], OPTIMIZERS["adamw"], clip_value=0.1)
    step(*batch(0))
    assert "clip_value" in step.generic
    step = stepper(POLICIES["split"], OPTIMIZERS["adamw"])
    with hs.edit_weights(step.model):
        step.optimizer.zero_grad()
    store = store_of(step.model)
    assert store is not None
    held = store.master(next(step.model.parameters()))
    step(*batch(0))
    assert "fp32 values of low weights are in use" in step.generic
    assert torch.equal(held.detach(), store.read(next(step.model.parameters())))
    del held
    step(*batch(1))
    assert step.generic == ""


def test_any_dense_layout_will_do() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 3))
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not other[0].weight.is_contiguous()
    steps = [
        hs.TrainStep(m, torch.optim.AdamW(m.parameters(), 1e-2), loss_fn, policy=POLICIES["split"])
        for m in (model, other)
    ]
    for i in range(3):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(i))
        y = torch.tensor([0, 1, 2, 0])
        for step in steps:
            step(x, y)
            assert step.generic == ""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p.float(), q.float(), atol=2e-2)
