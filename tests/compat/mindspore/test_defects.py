"""Where MindSpore 2.10 does the wrong thing (measured), this front-end does the right one. One test for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep.compat.mindspore as ms
from tests.compat.mindspore.nets import BF16, FP16, FP32, LeNet5, Normed, TorchNet, formats, picture, training, watched

NO_SCALE = "ignore:build_train_network:UserWarning"


def test_an_exception_inside_a_low_cell_leaves_nothing_low_behind() -> None:
    class Broken(ms.nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            assert (x @ x).dtype is FP16
            raise LookupError("broken")

    a = torch.randn(4, 4)
    for net in (Broken().to_float(ms.float16), ms.amp.auto_mixed_precision(Broken(), "O2")):
        with pytest.raises(LookupError):
            net(a)
        assert (a @ a).dtype is FP32 and torch.add(a, a).dtype is FP32 and nn.Linear(4, 4)(a).dtype is FP32


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_users_fp32_cell_survives_a_level(level: str) -> None:
    net = LeNet5()
    net.fc3.to_float(ms.float32)
    seen = formats(ms.amp.auto_mixed_precision(net, level))
    assert (seen["fc2"], seen["fc3"]) == (FP16, FP32)


def test_o1_covers_subclasses_functions_signs_and_classes_defined_anywhere() -> None:
    class MyDense(ms.nn.Dense):
        pass

    class Net(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.sub, self.plain = MyDense(4, 4), nn.Linear(4, 4)
            self.weight = ms.Parameter(torch.eye(4))

        # MindSpore casts nothing where self has another name
        def construct(this, x: Tensor) -> list[Tensor]:
            w = this.weight
            return [this.sub(x), this.plain(x), ms.ops.matmul(x, w), x @ w, x.matmul(w), F.linear(x, w), torch.mm(x, w)]

    net = ms.amp.auto_mixed_precision(Net(), "O1")
    x = torch.randn(3, 4)
    for i, y in enumerate(net(x)):
        assert y.dtype is FP32
        assert torch.equal(y, y.half().float()), f"product {i} was not computed in fp16"


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.filterwarnings(NO_SCALE)
def test_the_loss_is_fp32_inside_the_network_too_and_large_scales_stay_finite(level: str) -> None:
    net = LeNet5()
    with_loss, optimizer = training(net)
    manager = ms.amp.FixedLossScaleManager(2.0**20)
    step = ms.amp.build_train_network(with_loss, optimizer, level=level, loss_scale_manager=manager)
    with watched(with_loss) as seen:
        loss, _, _ = step(picture(net), torch.rand(2, 10) * 1e-3)
    assert seen["loss_fn"] == (FP32, FP32) and loss.dtype is FP32

    class Own(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = LeNet5(), ms.nn.MSELoss()

        def construct(self, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.net(x), y)  # type: ignore[no-any-return]

    own = ms.amp.auto_mixed_precision(Own(), level)
    x = torch.rand(2, 1, 32, 32)
    with watched(own) as seen:
        own(x, torch.rand(2, 10))
    assert seen["net.fc3"][1] is FP16 and seen["loss"][1] is FP32


def test_a_scale_that_has_grown_to_the_largest_number_comes_down_again() -> None:
    cell, scale = ms.nn.DynamicLossScaleUpdateCell(2.0**126, 2, 1), torch.tensor(2.0**126)
    for _ in range(5):
        cell(scale, torch.tensor(False))
    assert float(scale) == 2.0**127
    for _ in range(100):
        cell(scale, torch.tensor(True))
    assert float(scale) == 2.0**27


def test_low_gradients_are_unscaled_in_fp32_and_losses_scaled_in_fp32() -> None:
    scaler = ms.amp.StaticLossScaler(2.0**25)
    gradient = torch.tensor([60000.0, 1.0]).half()
    assert torch.equal(scaler.unscale(gradient), (gradient.float() / 2.0**25).half())
    assert float(scaler.unscale(gradient)[0]) > 0  # in fp16 arithmetic 1/2**25 is 0
    assert float(ms.amp.StaticLossScaler(2.0**20).scale(torch.tensor(1.0).half())) == 2.0**20  # fp16 ends at 65504
    thousandth = ms.amp.StaticLossScaler(1000.0).unscale((torch.tensor([1.0]).half(),))
    assert isinstance(thousandth, tuple) and thousandth[0].dtype is FP16
    assert float(thousandth[0]) == float(torch.tensor(0.001).half())
    exact = torch.randn(100)
    assert torch.equal(scaler.unscale([exact])[0], exact * 2.0**-25)


def test_scales_returned_by_earlier_steps_do_not_change_later() -> None:
    net = Normed()
    with_loss, optimizer = training(net)
    step = ms.nn.TrainOneStepWithLossScaleCell(with_loss, optimizer, ms.nn.DynamicLossScaleUpdateCell(8.0, 2, 1))
    scales = [step(picture(net), torch.rand(2, 3))[2] for _ in range(3)]
    assert [float(s) for s in scales] == [16.0, 32.0, 64.0]


def test_dynamic_scaling_runs_on_a_cpu_and_build_train_network_knows_bf16() -> None:
    for cast in (FP16, BF16):
        net = Normed()
        with_loss, optimizer = training(net)
        step = ms.amp.build_train_network(with_loss, optimizer, level="O2", cast_model_type=cast)
        loss, overflow, _ = step(picture(net), torch.rand(2, 3))
        assert loss.isfinite() and overflow.dtype is torch.bool


@pytest.mark.filterwarnings(NO_SCALE)
def test_a_fixed_scale_that_the_optimizer_was_not_told_of_does_not_diverge() -> None:
    curves = []
    for told, scale in ((1.0, 1.0), (1.0, 1024.0), (1024.0, 1024.0)):
        torch.manual_seed(0)
        net = LeNet5()
        with_loss, optimizer = training(net, loss_scale=told)
        manager = ms.amp.FixedLossScaleManager(scale, drop_overflow_update=False)
        step = ms.amp.build_train_network(with_loss, optimizer, level="O2", loss_scale_manager=manager)
        assert isinstance(step, ms.nn.TrainOneStepCell)
        torch.manual_seed(1)
        x, y = torch.rand(4, 1, 32, 32), torch.rand(4, 10)
        curves.append([float(step(x, y)) for _ in range(16)])
    plain, forgotten, matched = curves
    assert forgotten == pytest.approx(plain, rel=1e-3) and matched == pytest.approx(plain, rel=1e-3)


def test_a_step_runs_the_forward_pass_once() -> None:
    net = Normed()
    with_loss, optimizer = training(net)
    calls: list[int] = []
    net.fc.register_forward_hook(lambda *_: calls.append(1))
    ms.amp.build_train_network(with_loss, optimizer, level="O2")(picture(net), torch.rand(2, 3))
    assert len(calls) == 1


@pytest.mark.parametrize("make", [Normed, TorchNet])
@pytest.mark.filterwarnings(NO_SCALE)
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_bad_step_leaves_weights_momentum_and_batch_norm_statistics_as_they_were(make: Any, level: str) -> None:
    net = make()
    with_loss, optimizer = training(net)
    step = ms.amp.build_train_network(with_loss, optimizer, level=level)
    good, label = picture(net), torch.rand(2, 3)
    for _ in range(13):  # at O2 the first steps overflow: 2**24 is high
        step(good, label)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    momentum = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    for bad in (float("nan"), float("inf")):
        step(good * bad, label)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert all(torch.equal(a, s["momentum_buffer"]) for a, s in zip(momentum, optimizer.state.values(), strict=True))
    out = step(good, label)
    assert float(out[0] if isinstance(out, tuple) else out) < 10
    assert not torch.equal(before["bn.running_mean"], net.bn.running_mean)


@pytest.mark.filterwarnings(NO_SCALE)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_prediction_is_fp32_at_every_level(level: str) -> None:
    net = Normed()
    model = ms.Model(net, ms.nn.MSELoss(), training(net)[1], amp_level=level)
    assert model.predict(picture(net)).dtype is FP32


def test_labels_and_outputs_of_other_formats_reach_the_loss_in_fp32() -> None:
    net = LeNet5().to_float(ms.float16)
    loss = ms.nn.WithLossCell(net, nn.functional.mse_loss)(picture(net), torch.rand(2, 10).half())
    assert loss.dtype is FP32


def test_all_finite_knows_every_format_and_takes_tuples_only() -> None:
    for dtype in (FP16, BF16, FP32, torch.float64):
        good, bad = torch.ones(3, dtype=dtype), torch.tensor([1.0, float("nan")], dtype=dtype)
        answer = ms.amp.all_finite((good, None, good))
        assert answer.shape == () and answer.dtype is torch.bool and bool(answer)
        assert not ms.amp.all_finite([good, bad]) and not ms.amp.all_finite((good / 0,))
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([float("inf")]), (3,))
        assert not ms.amp.all_finite((sparse,))
    for wrong, error in ((torch.ones(2), TypeError), ((), ValueError), ((None,), ValueError), ((1.0,), TypeError)):
        with pytest.raises(error, match="all_finite"):
            ms.amp.all_finite(wrong)  # type: ignore[arg-type]


def test_a_scale_is_applied_to_tuples_and_lists_and_refuses_what_is_no_float() -> None:
    scaler = ms.amp.DynamicLossScaler(4.0, 2, 10)
    tree = scaler.scale((torch.ones(2), [torch.ones(1)]))
    assert isinstance(tree, tuple) and isinstance(tree[1], list) and float(tree[1][0]) == 4.0
    assert torch.equal(scaler.unscale(tree)[0], torch.ones(2))
    scaler.scale_value = torch.tensor(16.0)
    assert float(scaler.scale_value) == 16.0
    for wrong in (3.0, torch.ones(2).long(), {"a": torch.ones(1)}):
        with pytest.raises(TypeError, match="scale: "):
            scaler.scale(wrong)
    with pytest.raises(TypeError, match="adjust"):
        scaler.adjust("yes")  # type: ignore[arg-type]
