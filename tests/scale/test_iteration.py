"""Gradients that are there at `step` are unscaled exactly once, or an error says why they are not stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ScaleError
from halfstep.scale import GradScaler

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
}


def made(kind: str = "sgd", count: int = 2) -> tuple[list[nn.Parameter], torch.optim.Optimizer, GradScaler]:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    return params, KINDS[kind](params), GradScaler("cpu", init_scale=1024.0)


def differentiate(scaler: GradScaler, *params: Tensor, by: float = 1.0) -> None:
    torch.autograd.backward(scaler.scale(sum(((p * by).sum() for p in params), torch.zeros(()))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [True, False])
def test_unscale_before_the_backward_pass_finds_nothing_and_step_unscales(kind: str, held: bool) -> None:
    (p, q), optimizer, scaler = made(kind)
    for steps in range(1, 4):
        optimizer.zero_grad()
        loss = scaler.scale(p.sum() + q.sum()) if held else None
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        torch.autograd.backward(loss if loss is not None else scaler.scale(p.sum() + q.sum()))
        scaler.step(optimizer)
        assert not scaler.skipped(optimizer)
        scaler.update()
        assert p.tolist() == q.tolist() == [-steps, -steps]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_without_unscale_after_a_skip_by_hand_unscales(kind: str, bad: bool) -> None:
    (p, q), optimizer, scaler = made(kind)
    differentiate(scaler, p, q, by=float("inf") if bad else 1.0)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    differentiate(scaler, p, q)
    scaler.step(optimizer)
    assert p.tolist() == q.tolist() == [-1.0, -1.0] and not scaler.skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == (512.0 if bad else 1024.0)  # what the skipped step found counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["no", "first", "late"])
def test_a_parameters_first_gradient_after_unscale_is_unscaled_by_step(kind: str, bad: str) -> None:
    (p, q), optimizer, scaler = made(kind)
    differentiate(scaler, p, by=float("inf") if bad == "first" else 1.0)
    scaler.unscale_(optimizer)
    differentiate(scaler, q, by=float("nan") if bad == "late" else 3.0)
    scaler.step(optimizer)
    wanted = ([-1.0, -1.0], [-3.0, -3.0]) if bad == "no" else ([0.0, 0.0], [0.0, 0.0])
    assert (p.tolist(), q.tolist()) == wanted and bool(scaler.skipped(optimizer)) is (bad != "no")


@pytest.mark.parametrize("method", ["step", "unscale_"])
@pytest.mark.parametrize("change", ["none", "replaced", "replaced after", "clipped", "zeros"])
@pytest.mark.parametrize("held", [True, False])
def test_a_scaled_loss_added_to_unscaled_gradients_is_an_error(method: str, change: str, held: bool) -> None:
    (p, q), optimizer, scaler = made()
    loss = scaler.scale(p.sum()) if held else None
    differentiate(scaler, p, q)
    scaler.unscale_(optimizer)
    assert p.grad is not None
    if change == "replaced":
        p.grad = torch.nan_to_num(p.grad)
    elif change == "clipped":
        nn.utils.clip_grad_norm_([p, q], 0.1)
    elif change == "zeros":
        optimizer.zero_grad(set_to_none=False)
    torch.autograd.backward(loss if loss is not None else scaler.scale(p.sum()))
    if change == "replaced after":
        p.grad = torch.nan_to_num(p.grad)
    scaler.name_parameters([("first", p), ("second", q)])
    with pytest.raises(ScaleError, match=rf"{method}\(\): .* added to unscaled gradients: first; run every backward"):
        getattr(scaler, method)(optimizer)
    assert p.tolist() == q.tolist() == [0.0, 0.0]
    optimizer.zero_grad()  # and the way out
    differentiate(scaler, p, q)
    scaler.step(optimizer)
    assert p.tolist() == q.tolist() == [-1.0, -1.0]


def test_gradients_of_unknown_scale_after_an_empty_unscale_are_an_error() -> None:
    (p, q), optimizer, scaler = made()
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    torch.autograd.backward((p + q).sum())  # not a scaled loss
    with pytest.raises(
        ScaleError, match=r"step\(\): this SGD has gradients that came after unscale_\(\), and it is not"
    ):
        scaler.step(optimizer)


def test_unscale_twice_without_gradients_divides_nothing_twice() -> None:
    (p, q), optimizer, scaler = made()
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    differentiate(scaler, p, q)
    scaler.unscale_(optimizer)
    assert p.grad is not None and p.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]


def test_a_loss_of_another_optimizer_between_unscale_and_step_changes_nothing() -> None:
    """Clipping in place, replaced gradients and unscaled losses stay the user's right, also after it."""
    (p, q), first, scaler = made()
    (r, s), second, _ = made()
    differentiate(scaler, p, q, by=2.0)
    scaler.unscale_(first)
    differentiate(scaler, r, s)
    torch.autograd.backward(p.sum())  # an unscaled loss, added to an unscaled gradient
    assert p.grad is not None and q.grad is not None
    p.grad.mul_(0.5)
    q.grad = q.grad * 2.0
    scaler.unscale_(second)
    scaler.step(first)
    scaler.step(second)
    assert p.tolist() == [-1.5, -1.5] and q.tolist() == [-4.0, -4.0] and r.tolist() == s.tolist() == [-1.0, -1.0]


def test_a_gradient_penalty_adds_to_nothing() -> None:
    (p, q), optimizer, scaler = made()
    differentiate(scaler, p, q)
    scaler.unscale_(optimizer)
    torch.autograd.grad(scaler.scale((p * p).sum()), [p])
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]


def test_a_backward_pass_that_fails_halfway_is_noticed() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise MemoryError

    (p, q), optimizer, scaler = made()
    differentiate(scaler, p, q)
    scaler.unscale_(optimizer)
    apply: Any = Fails.apply
    loss = apply(q).sum() + p.sum()  # p is the nearer one and gets its gradient first
    with pytest.raises(MemoryError):
        torch.autograd.backward(scaler.scale(loss))
    assert p.grad is not None
    if p.grad.tolist() == [1.0, 1.0]:
        pytest.skip("autograd took the other branch first")
    with pytest.raises(ScaleError, match="added to unscaled gradients"):
        scaler.step(optimizer)


def test_scale_in_compiled_code_is_not_followed_and_doubt_is_an_error() -> None:
    torch._dynamo.reset()
    (p, q), optimizer, scaler = made()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def scaled() -> Tensor:
        return scaler.scale(p.sum() + q.sum())

    torch.autograd.backward(scaled())
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    torch.autograd.backward(scaled())
    with pytest.raises(ScaleError, match="it is not known whether they are scaled"):
        scaler.step(optimizer)
    scaler.forget()
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]


def test_a_usual_loop_has_no_hooks_and_keeps_no_losses() -> None:
    (p, q), optimizer, scaler = made()
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = scaler.scale(p.sum() + q.sum())
        losses.append(loss._backward_hooks)
        torch.autograd.backward(loss)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler.scale(torch.ones(()))  # dies here
    assert losses == [None] * 100 and len(scaler._waiting) <= 20


def test_a_step_that_raised_is_not_unscaled_again() -> None:
    class Fails(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError
            return super().step(closure)

    (p, q), _, scaler = made()
    optimizer = Fails([p, q], lr=1.0)
    differentiate(scaler, p, q)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    optimizer.fails = False
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]


def test_gradients_are_known_to_be_unscaled_until_others_come() -> None:
    (p, q), optimizer, scaler = made()
    assert not scaler.is_unscaled(optimizer)
    scaler.update(scaler.get_scale())  # asking was no work, and this starts anew
    differentiate(scaler, p, q)
    assert not scaler.is_unscaled(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.is_unscaled(optimizer)
    optimizer.zero_grad()
    differentiate(scaler, p, q)  # the step was left out
    assert not scaler.is_unscaled(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.is_unscaled(optimizer)
    scaler.step(optimizer)
    assert not scaler.is_unscaled(optimizer)


def test_names_can_be_given_to_another_scaler() -> None:
    (p, q), _, scaler = made()
    assert dict(scaler.named_parameters()) == {}
    scaler.name_parameters([("p", p), ("q", q)])
    assert {name: id(parameter) for name, parameter in scaler.named_parameters()} == {"p": id(p), "q": id(q)}
