"""apex.fp16_utils: networks made half by hand, masters by hand, FP16_Optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.apex import fp16_utils
from halfstep.compat.apex.fp16_utils import FP16_Optimizer

FP32, HALF = torch.float32, torch.float16


def gradient(parameter: Tensor) -> Tensor | None:
    return parameter.grad  # behind a call mypy does not remember the last look


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


SEEDED = torch.Generator().manual_seed(0)
X, TARGET = torch.randn(8, 4, generator=SEEDED), torch.randint(0, 2, (8,), generator=SEEDED)


def test_network_to_half_keeps_batchnorm() -> None:
    model = fp16_utils.network_to_half(network())
    assert isinstance(model[0], fp16_utils.tofp16) and model(X).dtype is HALF
    assert [p.dtype for p in model.parameters()] == [HALF, HALF, FP32, FP32, HALF, HALF]
    bare = nn.BatchNorm1d(3, affine=False).half()
    assert fp16_utils.BN_convert_float(bare) is bare and bare.running_mean.dtype is HALF  # type: ignore[union-attr]


def test_convert_network_converts_gradients_and_buffers_too() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.LSTM(6, 2))
    model[0].weight.grad = torch.ones(6, 4)
    assert fp16_utils.convert_network(model, HALF) is model
    assert model[0].weight.dtype is model[0].weight.grad.dtype is HALF
    assert model[1].weight.dtype is model[1].running_mean.dtype is FP32
    assert model[2].running_mean.dtype is model[3].weight_hh_l0.dtype is HALF
    assert model[2].num_batches_tracked.dtype is torch.int64


def test_fp16model_takes_inputs_of_any_format() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            output: Tensor = self.layer(x + self.table(index))
            return output

    model = fp16_utils.FP16Model(Two())
    assert model(X, TARGET).dtype is HALF


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand_train_the_half_model(flat: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).half()
    parameters, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert len(masters) == (1 if flat else 4) and {m.dtype for m in masters} == {FP32}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    optimizer = torch.optim.SGD(masters, lr=0.5)
    losses = []
    for _ in range(30):
        model.zero_grad()
        loss = F.cross_entropy(model(X.half()).float(), TARGET)
        loss.backward()
        fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=flat)
        fp16_utils.clip_grad_norm(masters, 5.0)
        optimizer.step()
        fp16_utils.master_params_to_model_params(parameters, masters, flat_master=flat)
        losses.append(fp16_utils.to_python_float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    values = torch.cat([m.detach().reshape(-1) for m in masters]).half()
    assert torch.equal(values, torch.cat([p.detach().reshape(-1) for p in parameters]))


def test_flat_masters_need_one_format_and_missing_gradients_are_none_or_zero() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="float16 and float32.*flat_master=False"):
        fp16_utils.prep_param_lists(model, flat_master=True)
    parameters, masters = fp16_utils.prep_param_lists(model)
    masters[0].grad = torch.ones(2)
    fp16_utils.model_grads_to_master_grads(parameters, masters)
    assert gradient(masters[0]) is None
    low = nn.ParameterList([nn.Parameter(torch.ones(2).half())])
    parameters, masters = fp16_utils.prep_param_lists(low, flat_master=True)
    fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=True)
    assert masters[0].grad is not None and masters[0].grad.tolist() == [0.0, 0.0]
    assert fp16_utils.to_python_float([3.5]) == 3.5


# ---------------------------------------------------------------------- FP16_Optimizer


def wrapped(**options: Any) -> tuple[nn.Module, FP16_Optimizer]:
    model = fp16_utils.network_to_half(network())
    return model, FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), verbose=False, **options)


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X).float(), TARGET)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_loss_scale": 128.0},
        {"dynamic_loss_scale": True},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 2}},
    ],
)
def test_it_trains_and_steps_masters(options: dict[str, Any]) -> None:
    model, optimizer = wrapped(**options)
    first = float(loss_of(model).detach())
    for _ in range(30):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.clip_master_grads(5.0)
        optimizer.step()
    assert float(loss_of(model).detach()) < 0.5 * first
    masters = optimizer.fp32_from_fp16_groups[0]
    assert {m.dtype for m in masters} == {FP32} and len(optimizer.fp32_from_fp32_groups[0]) == 2
    assert all(torch.equal(m.half(), p) for m, p in zip(masters, optimizer.fp16_groups[0], strict=True))
    assert optimizer.state is optimizer.optimizer.state and optimizer.param_groups is optimizer.optimizer.param_groups


def test_dynamic_scales_start_at_65536_and_take_the_arguments_of_the_scaler() -> None:
    assert wrapped(dynamic_loss_scale=True)[1].loss_scale == 2.0**16
    optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**8})[1]
    assert optimizer.loss_scale == 2.0**8
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scale == 4.0


def test_an_overflow_skips_the_step() -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True)
    before = copy.deepcopy(model.state_dict())
    optimizer.backward(loss_of(model) * float("inf"))
    assert (
        optimizer.overflow and optimizer.clip_master_grads(1.0) == -1 and optimizer.inspect_master_grad_data() is None
    )
    optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n, _ in model.named_parameters())
    assert optimizer.loss_scale == 2.0**15
    optimizer.zero_grad(set_grads_to_None=True)
    optimizer.backward(loss_of(model))
    data = optimizer.inspect_master_grad_data()
    assert data is not None and all(g is not None and g.dtype is FP32 for g in data[0])


def test_several_backward_passes_make_one_update() -> None:
    model, optimizer = wrapped(static_loss_scale=8.0)
    optimizer.backward(loss_of(model), update_master_grads=False, retain_graph=True)
    assert all(m.grad is None for m in optimizer.fp32_from_fp16_groups[0])
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.update_master_grads()
    assert all(m.grad is not None for m in optimizer.fp32_from_fp16_groups[0])


@pytest.mark.parametrize("options", [{"static_loss_scale": 8.0}, {"dynamic_loss_scale": True}])
def test_closures_work_and_are_evaluated_again_after_an_overflow(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).half()
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5), verbose=False, **options)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X.half()).float(), TARGET)
        calls.append(float(loss.detach()))
        bad = "dynamic_loss_scale" in options and len(calls) < 3
        optimizer.backward(loss * float("inf") if bad else loss)
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert calls[-1] < 0.5 * calls[0]


def test_a_closure_that_can_only_overflow_ends() -> None:
    model, optimizer = wrapped(static_loss_scale=8.0)

    def closure() -> Tensor:
        loss = loss_of(model) * float("nan")
        optimizer.backward(loss)
        return loss

    with (
        pytest.raises(RuntimeError, match="loss scale 8.0 does not go lower"),
        pytest.warns(UserWarning, match="static"),
    ):
        optimizer.step(closure)


def test_a_resumed_run_has_the_same_bits() -> None:
    def run(model: nn.Module, optimizer: FP16_Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            optimizer.backward(loss_of(model))
            optimizer.step()

    model, optimizer = wrapped(dynamic_loss_scale=True)
    run(model, optimizer, 3)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    run(model, optimizer, 3)
    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    assert set(state) == {
        "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "optimizer_state_dict",
        "fp32_from_fp16",
    }  # fmt: skip
    again, resumed = wrapped(dynamic_loss_scale=True)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    run(again, resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    with pytest.raises(RuntimeError, match="save its state_dict"):
        pickle.dumps(optimizer)


def test_groups_added_later_get_masters_and_other_formats_are_refused() -> None:
    _, optimizer = wrapped()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).half())]})
    assert optimizer.param_groups[1]["params"][0].dtype is FP32 and len(optimizer.fp16_groups[1]) == 1
    with pytest.raises(TypeError, match="got torch.DoubleTensor"):
        FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2).double())], lr=0.1))
