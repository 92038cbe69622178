"""Low copies of fp32 weights for a window: made once, never stale, gradients as torch.amp's, gone with the window."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import halfstep as hs

WIDTH = 128
BF16 = torch.bfloat16


class WeightCasts(TorchDispatchMode):
    """Counts tensors made low that have the size of a weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_to_copy" and out.dtype is BF16 and args[0].shape == (WIDTH, WIDTH):
            self.made += 1
        return out


class Twice(nn.Module):
    """One layer used twice, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x).relu()).relu())  # type: ignore[no-any-return]


def square(net: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = net(x)
    return out.float().square().mean()


def stepper(net: nn.Module, *, policy: str = "mixed", accumulate: int = 2, loss_fn: Any = square) -> hs.TrainStep:
    """Return a step whose weights are compared bit for bit with torch's, so torch's optimizer makes the update."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    return hs.TrainStep(net, optimizer, loss_fn, policy=hs.Policy.of(policy, dtype="bf16"), accumulate=accumulate)


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, 8, WIDTH, generator=torch.Generator().manual_seed(1)).unbind())


def by_hand(net: nn.Module, inputs: list[Tensor], accumulate: int, loss_fn: Any = square) -> None:
    """torch.amp: what the numbers have to be."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    for i, x in enumerate(inputs):
        with torch.autocast("cpu", dtype=BF16):
            loss = loss_fn(net, x)
        loss.backward(gradient=torch.tensor(1.0 / accumulate))
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def trained_as_by_torch_amp(
    net: nn.Module, inputs: list[Tensor], loss_fn: Any = square, *, by_hand_loss: Any = None, policy: str = "mixed"
) -> int:
    """Train `net` by a step, and a copy of it as torch.amp does, to the same bits; return the bytes of its copies."""
    twin = copy.deepcopy(net)
    step = stepper(net, policy=policy, loss_fn=loss_fn)
    most = 0
    for x in inputs:
        step(x)
        most = max(most, step.copies.bytes)
    by_hand(twin, inputs, 2, by_hand_loss or loss_fn)
    assert equal(net, twin)
    assert step.copies.bytes == 0  # the last window is over
    return most


@pytest.mark.parametrize("policy", ["torch", "mixed", "O1"])
@pytest.mark.parametrize("width", [WIDTH, 264])  # of the second, gradients are large enough to be added by the edge
def test_parameters_are_bit_for_bit_those_of_torch_amp(policy: str, width: int) -> None:
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width, bias=False))
    assert trained_as_by_torch_amp(net, list(torch.randn(6, 8, width).unbind()), policy=policy) >= 2 * 2 * width * width


def test_images_and_their_memory_format_give_the_bits_of_torch_amp() -> None:
    net = nn.Sequential(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = [torch.randn(2, 32, 8, 8).to(memory_format=torch.channels_last) for _ in range(4)]
    assert trained_as_by_torch_amp(net, inputs) > 2 * 64 * 128 * 9


@pytest.mark.parametrize("policy", ["torch", "mixed"])
def test_weights_are_cast_once_a_window(policy: str) -> None:
    net = Twice()
    step = stepper(net, policy=policy)
    with WeightCasts() as seen:
        for x in batches(4):
            step(x)
    assert seen.made == 2 * 2  # two weights, two windows


def test_windows_of_one_micro_batch_have_no_copies() -> None:
    net = nn.Sequential(nn.Linear(600, 600))
    held: list[int] = []

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        loss = square(net, x)
        held.append(step.copies.bytes)
        return loss

    step = stepper(net, accumulate=1, loss_fn=loss_fn)
    step(torch.randn(8, 600))
    assert held == [0] and step.copies not in step.parts


@pytest.mark.parametrize("how", ["flush", "error", "retry"])
def test_the_copies_of_a_window_go_with_it_however_it_ends(how: str) -> None:
    calls: list[int] = []

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        loss = square(net, x)
        calls.append(step.copies.bytes)
        if how == "error" and len(calls) == 2:
            raise ValueError("the second micro-batch")
        return loss * 1e36 if how == "retry" and len(calls) == 2 else loss  # its gradient overflows once scaled

    net = Twice()
    policy = hs.Policy.of("mixed", dtype="fp16" if how == "retry" else "bf16")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, optimizer, loss_fn, policy=policy, accumulate=2, retry=how == "retry")
    first, second = batches(2)
    step(first)
    assert step.copies.bytes
    if how == "flush":
        step.flush()
    elif how == "error":
        with pytest.raises(ValueError, match="second"):
            step(second)
    else:
        assert not bool(step(second).skipped)
        assert len(calls) == 4 and all(calls)
    assert step.copies.bytes == 0


def test_copies_report_their_bytes_and_are_freed() -> None:
    net = Twice()
    step = stepper(net, accumulate=3)
    step(batches(1)[0])
    assert step.copies.bytes == 2 * 2 * WIDTH * WIDTH
    step.copies.free()
    assert step.copies.bytes == 0
    step(batches(1)[0])
    assert step.copies.bytes == 2 * 2 * WIDTH * WIDTH


def writes() -> dict[str, Callable[[Tensor], Any]]:
    def in_place(p: Tensor) -> None:
        with torch.no_grad():
            p.mul_(0.5)

    def assigned(p: Tensor) -> None:
        p.data = p.data * 0.5

    def through_data(p: Tensor) -> None:
        p.data.mul_(0.5)

    return {"in place": in_place, "assigned": assigned, "through data": through_data}


@pytest.mark.parametrize("write", writes().values(), ids=writes())
@pytest.mark.parametrize("policy", ["torch", "mixed"])
def test_a_write_between_two_windows_is_seen(write: Callable[[Tensor], Any], policy: str) -> None:
    net, twin = Twice(), Twice()
    twin.load_state_dict(net.state_dict())
    step = stepper(net, policy=policy)
    inputs = batches(4)
    for x in inputs[:2]:
        step(x)
    write(net.second.weight)
    for x in inputs[2:]:
        step(x)
    by_hand(twin, inputs[:2], 2)
    write(twin.second.weight)
    by_hand(twin, inputs[2:], 2)
    assert equal(net, twin)


@pytest.mark.parametrize("name", ["in place", "assigned"])
@pytest.mark.parametrize("policy", ["torch", "mixed"])
def test_a_write_between_two_micro_batches_is_seen(name: str, policy: str) -> None:
    net, twin = Twice(), Twice()
    twin.load_state_dict(net.state_dict())
    step, inputs = stepper(net, policy=policy), batches(2)
    step(inputs[0])
    writes()[name](net.second.weight)
    step(inputs[1])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, fused=True)
    for i, x in enumerate(inputs):
        if i:
            writes()[name](twin.second.weight)
        with torch.autocast("cpu", dtype=BF16):
            loss = square(twin, x)
        loss.backward(gradient=torch.tensor(0.5))
    optimizer.step()
    assert equal(net, twin)


@pytest.mark.parametrize("write", writes().values(), ids=writes())
@pytest.mark.parametrize(("policy", "accumulate"), [("torch", 1), ("mixed", 1), ("mixed", 2)])
def test_a_write_in_forward_before_the_weight_is_used_is_seen(write: Any, policy: str, accumulate: int) -> None:
    class Shrinking(Twice):
        def forward(self, x: Tensor) -> Tensor:
            write(self.second.weight)
            return super().forward(x)

    net, twin = Shrinking(), Shrinking()
    twin.load_state_dict(net.state_dict())
    step, inputs = stepper(net, policy=policy, accumulate=accumulate), batches(4)
    for x in inputs:
        step(x)
    by_hand(twin, inputs, accumulate)
    assert equal(net, twin)


@pytest.mark.parametrize("policy", ["torch", "mixed"])
def test_a_write_between_two_uses_in_one_forward_reaches_the_second_and_not_the_first(policy: str) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            with torch.no_grad():
                self.layer.weight.mul_(2)
            return self.layer(x)  # type: ignore[no-any-return]

    net = Between()
    before = net.layer.weight.detach().clone()
    step = stepper(net, policy=policy, loss_fn=lambda net, x: (net(x).float().sum(), net(x).detach()))
    (x,) = batches(1)
    step(x)
    out = net.layer.weight.detach()
    assert torch.equal(out, before * 4)
    gradient = net.layer.weight.grad
    first, second = before.to(BF16).requires_grad_(), (before * 2).to(BF16).requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        F.linear(F.linear(x, first), second).float().sum().backward(gradient=torch.tensor(0.5))
    assert first.grad is not None and second.grad is not None
    assert torch.equal(gradient, second.grad.float() + first.grad.float())  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_of_before_the_update_has_the_weights_of_its_forward_pass(accumulate: int) -> None:
    net = Twice()
    outputs: list[Tensor] = []  # with their graphs, which results of a step are without

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        outputs.append(net(x))
        return square(net, x)

    step = stepper(net, loss_fn=loss_fn, accumulate=accumulate)
    inputs = [x.requires_grad_() for x in batches(2 * accumulate)]
    with torch.autocast("cpu", dtype=BF16):
        before = torch.autograd.grad(net(inputs[0]).sum(), inputs[0])[0]
    for x in inputs:
        step(x)
    assert torch.equal(torch.autograd.grad(outputs[0].sum(), inputs[0])[0], before)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", ["torch", "mixed"])
def test_recomputation_sees_the_same_copies(policy: str, reentrant: bool) -> None:
    class Checkpointed(Twice):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.second, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    net, twin = Checkpointed(), Checkpointed()
    twin.load_state_dict(net.state_dict())
    step, inputs = stepper(net, policy=policy), batches(4)
    with WeightCasts() as seen:
        for x in inputs:
            step(x)
    assert seen.made == 2 * 2  # two weights, two windows
    by_hand(twin, inputs, 2)
    assert equal(net, twin)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_a_first_use_without_gradients_serves_a_later_one_with_them(grad: Any) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        with grad():
            net(x)
        return square(net, x)

    trained_as_by_torch_amp(Twice(), batches(4), loss, by_hand_loss=square)


def test_weights_given_to_functional_call_are_used() -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        scaled = {name: p * 2 for name, p in net.named_parameters()}
        out: Tensor = torch.func.functional_call(net, scaled, (x,))
        return out.float().square().mean()

    trained_as_by_torch_amp(Twice(), batches(4), loss)


def test_a_parametrised_weight_is_computed_in_every_forward() -> None:
    net = nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    trained_as_by_torch_amp(net, batches(4))


def test_a_weight_frozen_between_steps_keeps_its_value_and_lets_gradients_through() -> None:
    net, twin = Twice(), Twice()
    twin.load_state_dict(net.state_dict())
    step, inputs = stepper(net), batches(4)
    for model, run in ((net, lambda xs: [step(x) for x in xs]), (twin, lambda xs: by_hand(twin, xs, 2))):
        run(inputs[:2])
        model.second.weight.requires_grad = False
        for p in model.parameters():
            p.grad = None
        run(inputs[2:])
    assert equal(net, twin)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_see_every_gradient(hook: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(264, 264))
    seen: list[torch.dtype] = []
    weight: Any = net[0].weight
    getattr(weight, hook)(lambda found: seen.append(found.dtype))
    step = stepper(net, accumulate=3)
    for x in torch.randn(3, 8, 264):
        step(x)
    assert seen == [torch.float32] * 3


def test_a_gradient_computed_inside_the_backward_pass_is_returned() -> None:
    class Adjoint(torch.autograd.Function):
        """Computes its parameter's gradient with a graph of its own, as adjoint methods do."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
            ctx.save_for_backward(x)
            ctx.layer = layer
            return layer(x).float()  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad(), torch.autocast("cpu", dtype=BF16):
                x = x.detach().requires_grad_()
                out = ctx.layer(x).float()
            return (*torch.autograd.grad(out, (x, ctx.layer.weight), gradient), None)

    def loss(net: Any, x: Tensor) -> Tensor:
        out: Tensor = Adjoint.apply(x, net[0].weight, net[0])  # type: ignore[no-untyped-call]
        return out.square().mean()

    net = nn.Sequential(nn.Linear(264, 264, bias=False))
    trained_as_by_torch_amp(net, list(torch.randn(4, 8, 264).unbind()), loss)


def test_a_penalty_on_the_gradient_is_differentiated_through_the_copy() -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        value = square(net, x)
        (gradient,) = torch.autograd.grad(value, next(net.parameters()), create_graph=True)
        return value + gradient.square().sum()

    net = nn.Sequential(nn.Linear(264, 264), nn.ReLU(), nn.Linear(264, 264))
    trained_as_by_torch_amp(net, list(torch.randn(4, 8, 264).unbind()), loss)


def test_the_first_gradient_of_a_window_is_not_added_to_the_last_windows() -> None:
    net = nn.Sequential(nn.Linear(264, 264))
    step = stepper(net, accumulate=2)
    for x in torch.randn(3, 8, 264):
        step(x)
    found = net[0].weight.grad
    twin = copy.deepcopy(net)
    twin.zero_grad()
    with torch.autocast("cpu", dtype=BF16):
        value = square(twin, x)
    value.backward(gradient=torch.tensor(0.5))
    assert torch.equal(found, twin[0].weight.grad)  # type: ignore[arg-type]


def test_a_copied_step_has_copies_of_its_own() -> None:
    net = Twice()
    step, inputs = stepper(net), batches(4)
    for x in inputs[:2]:
        step(x)
    other = copy.deepcopy(step)
    for x in inputs[2:]:
        step(x)
        other(x)
    assert equal(step.model, other.model)
    assert other.copies is not step.copies


def test_a_step_and_its_copies_go_with_the_last_reference() -> None:
    net = nn.Sequential(nn.Linear(264, 264))
    step = stepper(net)
    for x in torch.randn(2, 8, 264):
        step(x)
    gone = weakref.ref(step.copies)
    gc.collect()
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        gc.enable()


def test_fake_parameters_have_copies_too() -> None:
    with FakeTensorMode():
        net = Twice()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        step = hs.TrainStep(net, optimizer, square, policy=hs.Policy.of("mixed", dtype="bf16"), accumulate=2)
        step(torch.randn(8, WIDTH))
        assert step.copies.bytes == 2 * 2 * WIDTH * WIDTH
