"""The loss scale: bounded, told, and open to every kind of gradient."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.pains.eyes import Waits
from tests.pains.pain import pain

INF = float("inf")


def weight_and_sgd(size: int = 2, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.ones(size, dtype=dtype))
    return weight, torch.optim.SGD([("weight", weight)], lr=0.1)


def one_step(scaler: Any, weight: nn.Parameter, optimizer: torch.optim.Optimizer, *, bad: bool = False) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(scaler.scale(weight.sum() * (INF if bad else 1.0)))
    scaler.step(optimizer)
    scaler.update()


@pain(23, torch_fails_with=AssertionError, saying="weights are .*nan.* after a good batch")
def test_after_any_number_of_bad_steps_a_good_one_trains(amp: Any) -> None:
    weight, optimizer = weight_and_sgd()
    scaler = amp.GradScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what pain 24 is about
        for _ in range(200):
            one_step(scaler, weight, optimizer, bad=True)
    one_step(scaler, weight, optimizer)
    assert torch.allclose(weight, torch.full((2,), 0.9)), f"weights are {weight.tolist()} after a good batch"


@pain(23, torch_fails_with=AssertionError, saying="weights are .*-inf.* after a good batch")
def test_a_tiny_scale_does_not_make_infinite_updates(amp: Any) -> None:
    weight, optimizer = weight_and_sgd()
    scaler = amp.GradScaler("cpu", init_scale=2.0**-100)
    for _ in range(30):
        one_step_quietly(scaler, weight, optimizer)
    one_step(scaler, weight, optimizer)
    assert bool(weight.isfinite().all()), f"weights are {weight.tolist()} after a good batch"


def one_step_quietly(scaler: Any, weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_step(scaler, weight, optimizer, bad=True)


@pain(24, torch_fails_with=AssertionError, saying="nothing was said")
def test_a_long_series_of_bad_steps_is_reported_with_names(amp: Any) -> None:
    weight, optimizer = weight_and_sgd()
    scaler = amp.GradScaler("cpu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(100):
            one_step(scaler, weight, optimizer, bad=True)
    texts = [str(warning.message) for warning in said]
    assert texts, "nothing was said in 100 bad steps in a row"
    assert len(texts) == 1 and "weight (2 of 2 values)" in texts[0]


@pain(26, torch_fails_with=AssertionError, saying="the scale waited for the device")
def test_the_scale_is_logged_without_waiting(amp: Any) -> None:
    scaler = amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with Waits() as waits:
        scale = amp.scale_of(scaler)
    assert waits.count == 0, "asking for the scale waited for the device"
    assert scale.item() == 2.0**16


@pain(29, torch_fails_with=AssertionError, saying="No inf checks were recorded")
def test_an_optimizer_without_gradients_is_stepped_like_any_other(amp: Any) -> None:
    weight, optimizer = weight_and_sgd()
    unused, idle = weight_and_sgd()
    scaler = amp.GradScaler("cpu")
    torch.autograd.backward(scaler.scale(weight.sum()))
    scaler.step(optimizer)
    scaler.step(idle)
    scaler.update()
    assert torch.equal(unused, torch.ones(2)) and not torch.equal(weight, torch.ones(2))


@pain(30, torch_fails_with=RuntimeError, saying="has already been called")
def test_a_step_skipped_by_hand_needs_no_bookkeeping(amp: Any) -> None:
    weight, optimizer = weight_and_sgd()
    scaler = amp.GradScaler("cpu")
    for batch in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(weight.sum()))
        scaler.unscale_(optimizer)
        if batch == 0:
            continue  # say, the norm is an outlier
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose(weight, torch.full((2,), 0.9))


@pain(30, torch_fails_with=AssertionError, saying="still scaled")
def test_after_a_step_skipped_by_hand_the_next_one_unscales(amp: Any) -> None:
    weight, optimizer = weight_and_sgd()
    scaler = amp.GradScaler("cpu", init_scale=1024.0)
    for batch in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(weight.sum()))
        if batch == 0:
            scaler.unscale_(optimizer)  # and no step
    scaler.step(optimizer)
    assert torch.allclose(weight, torch.full((2,), 0.9)), f"gradients were still scaled: {weight.tolist()}"


@pain(31, torch_fails_with=ValueError, saying="Attempting to unscale FP16 gradients")
def test_fp16_gradients_can_be_unscaled(amp: Any) -> None:
    weight, optimizer = weight_and_sgd(dtype=torch.float16)
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    torch.autograd.backward(scaler.scale(weight.float().sum()))
    scaler.unscale_(optimizer)
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [torch.tensor(0.9).half().item()] * 2


@pain(33, torch_fails_with=AssertionError, saying="moved as if the gradient were")
def test_an_optimizer_with_a_closure_never_steps_on_scaled_gradients(amp: Any) -> None:
    def train(scaler: Any) -> Tensor:
        weight = nn.Parameter(torch.full((2,), 3.0))
        optimizer = torch.optim.LBFGS([weight], lr=0.01, max_iter=1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = scaler.scale((weight * torch.tensor([1.0, 2.0])).square().sum() * 0.01)
            torch.autograd.backward(loss)
            return loss

        closure()
        scaler.step(optimizer, closure)
        scaler.update()
        return weight.detach()

    expected = train(amp.GradScaler("cpu", enabled=False))
    try:
        got = train(amp.GradScaler("cpu", init_scale=16.0))
    except amp.errors:
        return  # the error names the remedy
    assert torch.equal(got, expected), f"moved as if the gradient were another: {got.tolist()}"


@pain(35, torch_fails_with=ValueError, saying="Attempting to unscale FP16 gradients")
def test_sparse_fp16_gradients_are_summed_without_overflow(amp: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True).half()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = amp.GradScaler("cpu", init_scale=2.0**15)
    before = table.weight.detach().clone()
    rows = torch.tensor([1, 1, 1, 1])  # 4 x 2**15 is more than fp16 holds, 4 x 1 is not
    torch.autograd.backward(scaler.scale(table(rows).float().sum()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(table.weight[1], before[1] - 4) and torch.equal(table.weight[0], before[0])


@pain(21, torch_fails_with=NotImplementedError, saying="not implemented for 'ComplexFloat'")
def test_complex_parameters_train_under_a_scale(amp: Any) -> None:
    weight, optimizer = weight_and_sgd(dtype=torch.complex64)
    scaler = amp.GradScaler("cpu")
    torch.autograd.backward(scaler.scale(weight.abs().square().sum()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(weight.real, torch.full((2,), 0.8))


@pain(36, torch_fails_with=AssertionError, saying="scaled in bf16")
def test_a_loop_for_every_dtype_scales_only_in_fp16(amp: Any) -> None:
    for dtype in ("bf16", "fp16"):
        model = nn.Linear(2, 1)
        scaler = amp.scaler_for(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype)
        loss = scaler.scale(torch.ones(()))
        assert bool(loss != 1) is (dtype == "fp16"), f"the loss was scaled in {dtype}, which has fp32's range"


@pain(37, torch_fails_with=RuntimeError, saying="GradScaler.scale.* should not be traced")
def test_forward_and_scale_compile_to_one_graph(amp: Any) -> None:
    torch._dynamo.reset()
    scaler = amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def scaled(x: Tensor) -> Tensor:
        loss: Tensor = scaler.scale((x * x).sum())
        return loss

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(3)).item() == 3 * 2.0**16
    scaler.update(4.0)
    assert compiled(torch.ones(3)).item() == 12.0  # not a constant of the graph


@pain(34, torch_fails_with=AssertionError, saying="65536 times too small", pending="a word on a step without scale()")
def test_a_forgotten_scale_is_told(amp: Any) -> None:
    weight, optimizer = weight_and_sgd()
    scaler = amp.GradScaler("cpu")
    one_step(scaler, weight, optimizer)
    optimizer.zero_grad()
    before = weight.detach().clone()
    weight.sum().backward()
    try:
        scaler.step(optimizer)
    except amp.errors:
        return  # the error names what was forgotten
    assert torch.allclose(before - weight, torch.full((2,), 0.1)), "the update is 65536 times too small"


@pain(43, torch_fails_with=AssertionError, saying="map object")
def test_a_dict_of_losses_is_scaled_as_a_dict(amp: Any) -> None:
    scaled = amp.GradScaler("cpu", init_scale=2.0).scale({"a": torch.ones(()), "b": [torch.ones(())]})
    assert isinstance(scaled, dict), f"scale(dict) returned {scaled}"
    assert scaled["a"].item() == 2.0 and scaled["b"][0].item() == 2.0


@pain(43, torch_fails_with=AttributeError, saying="'int' object has no attribute")
def test_the_scale_is_set_with_a_whole_number(amp: Any) -> None:
    scaler = amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(1024)
    assert scaler.get_scale() == 1024.0


@pain(43, torch_fails_with=AssertionError, saying="does not tell")
def test_a_checkpoint_remembers_bad_steps(amp: Any) -> None:
    states = []
    for order in ((True, False), (False, True, True, False)):
        weight, optimizer = weight_and_sgd()
        scaler = amp.GradScaler("cpu", growth_interval=1)
        for bad in order:
            one_step(scaler, weight, optimizer, bad=bad)
        states.append(scaler.state_dict())
    assert states[0] != states[1], "the checkpoint does not tell 1 bad step from 2"
