"""Masters: what only they do, and how optimizers come to step them; their laws are in test_strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import WeightsError
from halfstep.weights.strategies import MasterWeights
from tests.weights.small import buffers, gradients, shapes

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32


def adopted(parameters: list[nn.Parameter], low: torch.dtype = BF16) -> MasterWeights:
    return MasterWeights([(f"p{i}", p) for i, p in enumerate(parameters)], low)


def test_low_adam_state_would_lose_the_resume() -> None:
    """The fault twin: torch casts loaded state to a low parameter's format, and small second moments become zero."""
    low = nn.Parameter(torch.zeros(3).half())
    optimizer = torch.optim.Adam([low])
    state = {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.full((3,), 5e-10)}}
    }
    optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.state[low]["exp_avg_sq"].abs().sum() == 0
    parameter = nn.Parameter(torch.zeros(3))
    kept = torch.optim.Adam([parameter])
    store = adopted([parameter], HALF)
    store.attach(kept)
    kept.load_state_dict({**state, "param_groups": kept.state_dict()["param_groups"]})
    assert kept.state[parameter]["exp_avg_sq"].dtype is FP32 and (kept.state[parameter]["exp_avg_sq"] == 5e-10).all()


def test_hooks_on_gradients_survive_a_step() -> None:
    """DistributedDataParallel registers its reducer on the AccumulateGrad node; `.data` of another dtype resets it."""

    def survives(step: Callable[[nn.Parameter], None]) -> bool:
        parameter = nn.Parameter(torch.ones(3))
        store = adopted([parameter])
        optimizer = torch.optim.SGD([parameter], 0.1)
        store.attach(optimizer)
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert node is not None
        calls: list[int] = []
        node.register_hook(lambda *_: calls.append(1))
        parameter.sum().backward()
        step(parameter) if step is not take else optimizer.step()
        parameter.sum().backward()
        return len(calls) == 2

    def take(parameter: nn.Parameter) -> None: ...

    def repoint(parameter: nn.Parameter) -> None:
        low = parameter.data
        parameter.grad = None
        parameter.data = low.float()
        parameter.data = low

    assert survives(take)
    assert not survives(repoint)


def test_groups_added_later_frozen_shared_and_fp32_parameters() -> None:
    a, b, frozen, island = (nn.Parameter(torch.randn(3)) for _ in range(4))
    frozen.requires_grad_(False)
    store = MasterWeights([("a", a), ("tied", a), ("b", b), ("frozen", frozen)], BF16)
    assert len(list(store.parameters())) == 3 and island not in store
    optimizer = torch.optim.AdamW([{"params": [a, frozen], "lr": 0.1}, {"params": [island], "lr": 0.2}])
    store.attach(optimizer)
    optimizer.add_param_group({"params": [b], "lr": 0.3})
    frozen_value = store.read(frozen)
    before = store.read(a), island.detach().clone(), store.read(b)
    for p in (a, b, island):
        p.grad = torch.ones_like(p)
    optimizer.step()
    after = store.read(a), island.detach(), store.read(b)
    for rate, x, y in zip((0.1, 0.2, 0.3), before, after, strict=True):
        assert torch.allclose(x - y, torch.full((3,), rate), atol=0.01)
    assert torch.equal(store.read(frozen), frozen_value) and frozen.grad is None
    assert not store.master(frozen).requires_grad


def test_adopting_later_and_a_low_checkpoint() -> None:
    low = nn.Parameter(torch.randn(3).bfloat16())
    late = nn.Parameter(torch.randn(3))
    store = MasterWeights([("low", low)], BF16)
    optimizer = torch.optim.SGD([low, late], 1.0)
    store.attach(optimizer)
    store.adopt("late", late)
    assert late.dtype is BF16
    low.grad, late.grad = torch.full_like(low, 1e-4), torch.full_like(late, 1e-4)
    before = store.read(low)
    optimizer.step()
    assert torch.allclose(before - store.read(low), torch.full((3,), 1e-4), rtol=1e-2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_schedulers_before_and_after(set_to_none: bool) -> None:
    parameters = shapes()
    optimizer = torch.optim.SGD(parameters, 1.0)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    store = adopted(parameters)
    store.attach(optimizer)
    late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    gradients(parameters, 0, BF16)
    optimizer.step()
    early.step()
    late.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    for p in parameters:
        assert p.grad is None if set_to_none else p.grad is not None and not p.grad.any()


def test_gradients_are_widened_once_into_the_same_buffers() -> None:
    parameters = shapes()
    optimizer = torch.optim.SGD(parameters, 0.1)
    store = adopted(parameters)
    store.attach(optimizer)
    gradients(parameters, 0, BF16)
    first = store.attached[id(optimizer)].widen_gradients(optimizer)
    assert all(g.dtype is FP32 for g in first) and store.attached[id(optimizer)].widen_gradients(optimizer) is first
    optimizer.step()
    gradients(parameters, 1, BF16)
    second = store.attached[id(optimizer)].widen_gradients(optimizer)
    assert [g.data_ptr() for g in first] == [g.data_ptr() for g in second]
    store.attached[id(optimizer)].drop_gradients()
    assert sum(b.numel() for b in buffers(store)) == sum(p.numel() for p in parameters)
    store.release()
    assert not buffers(store)


def test_fp32_gradients_are_used_as_they_are() -> None:
    parameter = nn.Parameter(torch.ones(3))
    store = adopted([parameter])
    optimizer = torch.optim.SGD([parameter], 1.0)
    store.attach(optimizer)
    parameter.grad_dtype = FP32
    parameter.grad = torch.full((3,), 1e-5)
    optimizer.step()
    assert torch.equal(store.read(parameter), torch.ones(3) - 1e-5)


def test_errors_name_what_is_wrong_and_change_nothing() -> None:
    good, integer = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())
    with pytest.raises(WeightsError, match=r"parameter wrong is torch.float64.*'keep'"):
        MasterWeights([("good", good), ("wrong", integer)], BF16)
    assert good.dtype is FP32
    store = adopted([good])
    optimizer = torch.optim.SGD([good], 0.1)
    store.attach(optimizer)
    good.grad = torch.ones_like(good)
    optimizer.step()


def test_an_optimizer_made_later_steps_the_masters_too() -> None:
    def train(when: str) -> list[Tensor]:
        parameters = shapes()
        optimizer = torch.optim.AdamW(parameters, 1e-2)
        store = adopted(parameters)
        if when == "attached":
            store.attach(optimizer)
        elif when == "made later":
            optimizer = torch.optim.AdamW(parameters, 1e-2)
        else:
            optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], 1e-2)
            optimizer.step()
            optimizer.add_param_group({"params": parameters})
        for i in range(4):
            gradients(parameters, i, BF16)
            optimizer.step()
        assert id(optimizer) in store.attached
        return [store.read(p) for p in parameters]

    want = train("attached")
    for when in ("made later", "group added later"):
        assert all(torch.equal(a, b) for a, b in zip(train(when), want, strict=True)), when


def test_adagrad_made_later_has_precise_state() -> None:
    parameters = shapes()
    store = adopted(parameters)
    optimizer = torch.optim.Adagrad(parameters, 1e-2)
    gradients(parameters, 0, BF16)
    optimizer.step()
    assert id(optimizer) in store.attached and all(optimizer.state[p]["sum"].dtype is FP32 for p in parameters)


def test_state_that_was_rounded_on_loading_is_refused() -> None:
    parameters = shapes()
    optimizer = torch.optim.AdamW(parameters)
    gradients(parameters, 0, FP32)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    store = adopted(parameters)
    late = torch.optim.AdamW(parameters)
    late.load_state_dict(saved)
    gradients(parameters, 0, BF16)
    before = [store.read(p) for p in parameters]
    with pytest.raises(WeightsError, match=r"AdamW for p0 was rounded to torch.bfloat16.*hs.prepare\(model, optimizer"):
        late.step()
    assert all(torch.equal(store.read(p), b) for p, b in zip(parameters, before, strict=True))
    store.attach(late)
    late.load_state_dict(saved)
    late.step()


@pytest.mark.parametrize("then", ["cleared", "zeroed", "replaced"])
def test_gradients_of_a_step_that_raised_are_not_used_again(then: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    store = adopted([parameter])
    optimizer = torch.optim.SGD([parameter], 1.0)
    store.attach(optimizer)
    (100 * parameter).sum().backward()
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    if then == "replaced":
        parameter.grad = torch.ones_like(parameter)
    else:
        optimizer.zero_grad(set_to_none=then == "cleared")
        store.restore()  # as the next forward pass does
        parameter.sum().backward()
    optimizer.step()
    assert torch.equal(store.read(parameter), -torch.ones(2))


def test_low_weights_changed_by_hand_change_their_masters() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]) + 1e-4)
    store = adopted([parameter])
    optimizer = torch.optim.SGD([parameter], 0.5)
    store.attach(optimizer)
    with torch.no_grad():
        parameter[1] = 7.0
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    want = torch.tensor([1.0 + 1e-4, 7.0, 3.0 + 1e-4]) - 0.5  # untouched elements keep what bf16 cannot hold
    assert torch.allclose(store.read(parameter), want, rtol=0, atol=1e-6)
    assert torch.equal(parameter, want.bfloat16())
    nn.init.ones_(parameter)
    assert torch.equal(store.read(parameter), torch.ones(3))
    nn.init.zeros_(parameter)
    store.release()
    assert torch.equal(parameter, torch.zeros(3))


def test_one_optimizer_over_two_stores() -> None:
    def train(parts: int) -> list[Tensor]:
        parameters = shapes()
        optimizer = torch.optim.AdamW(parameters, 1e-2)
        stores = [adopted(parameters[i::parts]) for i in range(parts)]
        for store in stores:
            store.attach(optimizer)
        for i in range(4):
            gradients(parameters, i, BF16)
            optimizer.step()
            optimizer.state_dict()
            assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        return [next(s for s in stores if p in s).read(p) for p in parameters]

    assert all(torch.equal(a, b) for a, b in zip(train(1), train(2), strict=True))
