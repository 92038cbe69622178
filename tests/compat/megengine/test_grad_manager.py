"""megengine.autodiff: what is attached gets gradients, once, wherever backward is called."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import halfstep.compat.megengine as mge
import halfstep.compat.megengine.functional as F
from halfstep.compat.megengine import amp
from halfstep.compat.megengine.autodiff import GradManager
from halfstep.errors import StepError


def grad(tensor: Tensor) -> list[float]:
    assert tensor.grad is not None
    return tensor.grad.tolist()


def test_attached_tensors_get_gradients_and_others_do_not() -> None:
    x, w = mge.tensor([1.0, 2.0]), mge.Parameter(mge.tensor([3.0, 4.0]))
    gm = GradManager().attach(x)
    with gm:
        gm.backward((x * w).sum())
    assert grad(x) == [3.0, 4.0] and w.grad is None
    assert gm.attached_tensors()[0] is x


def test_record_and_release_are_what_with_does() -> None:
    w = mge.Parameter(mge.tensor([3.0]))
    gm = GradManager().attach([w])
    gm.record()
    gm.backward(w * 2)
    gm.record()
    gm.release()
    assert grad(w) == [2.0]


def test_gradients_accumulate_in_place() -> None:
    w = mge.Parameter(mge.tensor([3.0]))
    gm = GradManager().attach(w)
    for _ in range(3):
        with gm:
            gm.backward((w * 2).sum())
    assert grad(w) == [6.0]


def test_several_outputs_and_their_gradients() -> None:
    w = mge.Parameter(mge.tensor([3.0]))
    gm = GradManager().attach(w)
    with gm:
        gm.backward([w * 2, w * 3], [mge.tensor([1.0]), mge.tensor([10.0])])
    assert grad(w) == [32.0]
    with gm:
        gm.backward()  # nothing to do, as in a rank without a loss
    assert grad(w) == [32.0]


def test_no_two_gradients_share_memory() -> None:
    a, b, x = mge.Parameter(torch.ones(2)), mge.Parameter(torch.ones(2)), mge.tensor([1.0, 2.0])
    gm = GradManager().attach([a, b])
    with gm:
        gm.backward(a + b, x)
    assert a.grad is not None and b.grad is not None
    a.grad *= 2
    assert grad(b) == [1.0, 2.0] and x.tolist() == [1.0, 2.0] and grad(a) == [2.0, 4.0]
    wide = mge.Parameter(torch.ones(3, 2))
    with gm.attach(wide):
        gm.backward(wide.sum())
    assert wide.grad is not None and wide.grad.is_contiguous()


def test_callbacks_see_the_gradient_of_each_backward_before_it_is_added() -> None:
    seen: list[Any] = []
    w = mge.Parameter(mge.tensor([1.0]))

    def note(tensor: Tensor, gradient: Tensor) -> Tensor:
        seen.append((tensor is w, gradient.item()))
        return gradient

    gm = GradManager().attach(w, callbacks=[note, lambda tensor, gradient: gradient * 10])
    gm.attach(w, callbacks=lambda tensor, gradient: gradient + 1)
    for factor in (2, 3):
        with gm:
            gm.backward((w * factor).sum())
    assert seen == [(True, 2.0), (True, 3.0)] and grad(w) == [52.0]


def test_a_callback_that_returns_none_drops_the_gradient_and_one_that_returns_nonsense_is_refused() -> None:
    w, other = mge.Parameter(mge.tensor([1.0])), mge.Parameter(mge.tensor([1.0]))
    gm, seen = GradManager().attach(w, callbacks=lambda tensor, gradient: None).attach(other), []
    gm.attach(w, callbacks=lambda tensor, gradient: seen.append(gradient))  # what it returns is None too
    for _ in range(2):
        with gm:
            gm.backward(w * other)
    assert w.grad is None and grad(other) == [2.0] and seen == [None, None]
    for wrong in (1.0, mge.tensor([1.0, 2.0])):
        untyped: Any = lambda tensor, gradient, wrong=wrong: wrong  # noqa: E731
        gm = GradManager().attach(w, callbacks=untyped)
        with gm, pytest.raises(StepError, match="expected its gradient, or None to drop it"):
            gm.backward(w * 2)


def test_intermediate_results_can_be_attached() -> None:
    w = mge.Parameter(mge.tensor([2.0]))
    gm = GradManager()
    with gm:
        hidden = w * 3
        gm.attach(hidden)
        gm.backward(hidden * hidden)
    assert grad(hidden) == [12.0] and w.grad is None


def test_managers_nest_for_higher_derivatives() -> None:
    x = mge.tensor([2.0])
    with GradManager().attach(x) as outer:
        with GradManager().attach(x) as inner:
            inner.backward(x**3)
        first = x.grad
        assert first is not None
        x.grad = None
        outer.backward(first)
    assert first.item() == 12.0 and grad(x) == [12.0]


def test_gradients_are_functions_to_managers_around_and_constants_inside_and_beside() -> None:
    x = mge.tensor([0.5])
    first, second = -torch.sin(torch.tensor(0.5)).item(), -torch.cos(torch.tensor(0.5)).item()
    outer, middle, inner = (GradManager().attach(x) for _ in range(3))
    with outer:
        with middle:
            with inner:
                middle.backward(F.cos(x))
                made = x.grad
                assert made is not None
                inner.backward(made * 2)
        assert grad(x) == pytest.approx([first])
        x.grad = None
        outer.backward(made)
    assert grad(x) == pytest.approx([second])

    x.grad = None
    with outer:
        with middle | inner:
            middle.backward(F.cos(x))
            made = x.grad
            x.grad = None
            inner.backward(made)
        assert grad(x) == [0.0]
        outer.backward(made)
    assert grad(x) == pytest.approx([second])


def test_a_gradient_is_a_constant_where_no_manager_is_around() -> None:
    x = mge.tensor([0.5])
    first, second = GradManager().attach(x), GradManager().attach(x)
    with second, first:
        second.backward(F.cos(x))
        with pytest.raises(StepError, match="constant to those inside it or beside it"):
            first.backward(x.grad)
    with first | second:
        made = F.cos(x)
        first.backward(made)
        second.backward(made)  # each has what it needs of the forward pass
    assert grad(x) == pytest.approx([-3 * torch.sin(torch.tensor(0.5)).item()])
    assert x.grad is not None and not x.grad.requires_grad


def test_an_outer_manager_differentiates_by_the_gradients_of_outputs() -> None:
    x = mge.tensor([0.5, 1.0])
    with GradManager() as outer:
        with GradManager().attach([x]) as inner:
            y = F.sin(x)
            along = F.zeros_like(y)
            outer.attach(along)
            inner.backward(y, along)
        assert x.grad is not None
        outer.backward(x.grad)
    assert grad(along) == pytest.approx(torch.cos(x).tolist())


def test_two_managers_share_a_forward_pass() -> None:
    a, b = mge.Parameter(mge.tensor([2.0])), mge.Parameter(mge.tensor([5.0]))
    first, second = GradManager().attach(a), GradManager().attach(b)
    with first, second:
        shared = a * b
        second.backward(shared)
        first.backward(shared * 2)
    assert grad(a) == [10.0] and grad(b) == [2.0]


def test_a_group_goes_backward_together() -> None:
    a, b = mge.Parameter(mge.tensor([2.0])), mge.Parameter(mge.tensor([5.0]))
    group = GradManager().attach(a) | GradManager().attach(b)
    with group:
        group.backward(a * b)
    assert grad(a) == [5.0] and grad(b) == [2.0]
    assert [id(t) for t in group.attached_tensors()] == [id(a), id(b)]
    assert len((group | GradManager()).attached_tensors()) == 2


def test_attached_tensors_are_not_kept_alive() -> None:
    w = mge.Parameter(mge.tensor([2.0]))
    gm = GradManager().attach([w, mge.tensor([1.0])])
    gc.collect()
    assert [id(t) for t in gm.attached_tensors()] == [id(w)]


def test_an_unused_parameter_has_no_gradient() -> None:
    used, unused = mge.Parameter(mge.tensor([2.0])), mge.Parameter(mge.tensor([5.0]))
    gm = GradManager().attach(iter([used, unused]))
    with gm:
        gm.backward(used * 2)
    assert grad(used) == [2.0] and unused.grad is None


def test_backward_is_the_same_inside_and_outside_of_autocast() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    gm, x = GradManager().attach(net.parameters()), torch.randn(3, 4)
    found = []
    for inside in (True, False):
        with gm:
            with amp.autocast():
                loss = F.nn.square_loss(net(x), torch.zeros(3, 2))
                if inside:
                    gm.backward(loss)
            if not inside:
                gm.backward(loss)
        found.append([p.grad for p in net.parameters()])
        for p in net.parameters():
            p.grad = None
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.equal(a, b) and a.dtype is torch.float32


def test_wrong_use_is_explained() -> None:
    w = mge.Parameter(mge.tensor([2.0]))
    gm = GradManager().attach(w)
    with pytest.raises(RuntimeError, match="no computation history"):
        gm.backward(w * 2)
    with gm:
        gm.backward(w * 2)
        with pytest.raises(StepError, match="call it once"):
            gm.backward(w * 2)
    with gm, pytest.raises(StepError, match="recording already"):
        gm.record()
    with gm, pytest.raises(StepError, match="2 outputs and 1 gradients"):
        gm.backward([w, w], mge.tensor([1.0]))
    with gm, pytest.raises(StepError, match=r"dy has shape \(2,\) and y \(1,\)"):
        gm.backward(w * 2, mge.tensor([1.0, 1.0]))
    with gm, pytest.raises(StepError, match="depends on no attached tensor"):
        gm.backward(mge.tensor([1.0]))
    with pytest.raises(StepError, match="a tensor of torch.int32"):
        gm.attach([w, mge.tensor([1])])
    with pytest.raises(StepError, match="got 'w'"):
        gm.attach(["w"])  # type: ignore[list-item]


def test_nothing_is_left_behind_when_the_forward_pass_raises() -> None:
    gm = GradManager().attach(mge.Parameter(mge.tensor([2.0])))
    hooks = len(modules._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), gm:
        raise ZeroDivisionError
    assert len(modules._global_forward_pre_hooks) == hooks
    with gm:
        assert len(modules._global_forward_pre_hooks) == hooks + 1
