"""fp32 gradients of low parameters over micro-batches: the bits of autograd's own sums, in memory that stays."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.step import settings
from halfstep.step.parts.gradients import Sums
from tests.stepping import without_collector

WIDTH = 264


class Net(nn.Module):
    """Large and small layers; the large one `twice` is used two times, or is tied."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 4)
        if way == "tied":
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.way == "checkpointed":
            x = checkpoint(lambda x: self.second(self.second(x)), x, use_reentrant=True)
        elif self.way == "twice":
            x = self.second(self.second(x))
        else:
            x = self.second(x)
        return self.head(x)  # type: ignore[no-any-return]


def square(net: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = net(x)
    return out.float().square().mean()


def stepper(net: nn.Module, *, dtype: str = "bf16", accumulate: int = 3) -> hs.TrainStep:
    policy = hs.Policy.of("pure", dtype=dtype, grads="fp32", scale="none")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return hs.TrainStep(net, optimizer, square, policy=policy, accumulate=accumulate, clip_norm=1.0)


def by_autograd(net: nn.Module, **named: Any) -> hs.TrainStep:
    """Return a step whose gradients autograd casts and adds: in the format of each parameter's `grad_dtype`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "Sums", lambda low, hooked, windows: Sums(low, hooked=False, windows=windows))
        return stepper(net, **named)


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 8, WIDTH, generator=torch.Generator().manual_seed(1)).unbind())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("way", ["once", "twice", "tied", "checkpointed"])
def test_parameters_are_bit_for_bit_those_of_autograds_sums(way: str, accumulate: int) -> None:
    net = Net(way)
    twin = copy.deepcopy(net)
    ours, theirs = stepper(net, accumulate=accumulate), by_autograd(twin, accumulate=accumulate)
    for x in batches(2 * accumulate):
        assert torch.equal(ours(x).loss, theirs(x).loss)
    one, other = net.state_dict(), twin.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_low_sum_would_be_another_one() -> None:
    net = Net("once")
    twin = copy.deepcopy(net)
    ours, theirs = stepper(net), by_autograd(twin)
    for parameter in twin.parameters():
        parameter.grad_dtype = parameter.dtype
    for step in (ours, theirs):
        for x in batches(3):
            step(x)
    assert not torch.equal(net.state_dict()["second.weight"], twin.state_dict()["second.weight"])


def test_a_short_window_is_flushed() -> None:
    net = Net("once")
    twin = copy.deepcopy(net)
    ours, theirs = stepper(net), by_autograd(twin)
    for step in (ours, theirs):
        for x in batches(2):
            step(x)
        assert step.flush() is not None
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_a_window_that_raises_leaves_nothing_to_the_next() -> None:
    net = Net("once")
    twin = copy.deepcopy(net)
    ours, theirs = stepper(net), stepper(twin)
    ours(batches(1)[0])
    with pytest.raises(RuntimeError):
        ours(torch.randn(2, 3))
    for step in (ours, theirs):
        for x in batches(3):
            step(x)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_a_hook_of_somebody_else_finds_the_gradient() -> None:
    net = Net("once")
    step = stepper(net)
    seen: list[Any] = []
    net.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    for x in batches(3):
        step(x)
    assert seen == [True] * 3


def test_a_parameter_without_gradient_gets_none() -> None:
    class Skipping(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x))  # type: ignore[no-any-return]

    net = Skipping("once")
    before = net.second.weight.detach().clone()
    step = stepper(net)
    for x in batches(3):
        step(x)
    assert torch.equal(net.state_dict()["second.weight"], before)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("failing", [False, True])
def test_a_loop_beside_a_step_accumulates_in_fp32_too(accumulate: int, failing: bool) -> None:
    net = Net("once")
    step = stepper(net, accumulate=accumulate)
    for x in batches(accumulate):
        step(x)
    if failing:

        def stop(gradient: Tensor) -> None:
            raise ZeroDivisionError

        handle = net.first.bias.register_hook(stop)
        with pytest.raises(ZeroDivisionError):
            step(batches(1)[0])
        handle.remove()
    net.zero_grad()
    for x in batches(2):
        square(net, x).backward()
        assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}


def test_hooks_do_not_keep_a_step() -> None:
    net = Net("once")
    step = stepper(net)
    for x in batches(3):
        step(x)
    gone = weakref.ref(step)
    with without_collector():
        del step
        assert gone() is None
    square(net, batches(1)[0]).backward()
    assert net.second.weight.grad is not None
