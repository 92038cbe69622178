"""Training cells: what a call takes, returns and changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep.compat.mindspore as ms
from tests.compat.mindspore.nets import BF16, FP32, LeNet5, Normed, TorchNet, training, untyped

One, WithScale = ms.nn.TrainOneStepCell, ms.nn.TrainOneStepWithLossScaleCell


class Line(ms.nn.Cell):
    """y = weight * x, whose loss is the mean of y: the gradient is the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ms.Parameter([1.0])

    def construct(self, x: Tensor) -> Tensor:
        return (self.weight * x).mean()


def line(**kwargs: Any) -> tuple[Line, Any]:
    net = Line()
    return net, ms.nn.Momentum(net.trainable_params(), 0.5, 0.0, **kwargs)


def weight(net: Line) -> float:
    return float(net.weight.detach())


def test_a_plain_step_returns_the_loss_before_the_update_and_trains() -> None:
    net, optimizer = line()
    loss = One(net, optimizer)(torch.tensor([1.0, 3.0]))
    assert isinstance(loss, Tensor) and loss.shape == () and float(loss) == 2.0 and not loss.requires_grad
    assert weight(net) == 1.0 - 0.5 * 2.0


@pytest.mark.parametrize("optimizer_scale", [1.0, 1024.0])
@pytest.mark.parametrize("sens", [1.0, 1024.0])
def test_gradients_are_divided_by_the_scale_once_for_every_combination(sens: float, optimizer_scale: float) -> None:
    # MindSpore: right for equal numbers only; with sens alone the step is 1024 times too long, without a word
    net, optimizer = line(loss_scale=optimizer_scale)
    One(net, optimizer, sens)(torch.tensor([2.0]))
    assert weight(net) == 0.0
    net, optimizer = line(loss_scale=optimizer_scale)
    WithScale(net, optimizer, ms.Tensor(sens))(torch.tensor([2.0]))
    assert weight(net) == 0.0


@pytest.mark.parametrize("own", [1e-4, 512.0])
def test_gradients_are_divided_once_also_where_the_optimizers_number_is_another(own: float) -> None:
    # MindSpore: the step is too long by the quotient, and too short by the optimizer's number if the scale moves
    x, update = torch.tensor([2.0]), ms.nn.DynamicLossScaleUpdateCell(2.0**10, 2, 1)
    for make in (
        lambda net, optimizer: One(net, optimizer, 1024.0),
        lambda net, optimizer: WithScale(net, optimizer, ms.Tensor(1024.0)),
        lambda net, optimizer: WithScale(net, optimizer, update),
        lambda net, optimizer: ms.amp.build_train_network(
            net, optimizer, level="auto", loss_scale_manager=ms.amp.FixedLossScaleManager(128, False)
        ),
    ):
        net, optimizer = line(loss_scale=own)
        cell = make(net, optimizer)  # type: ignore[no-untyped-call]  # lambdas have no types
        for step in (1, 2):
            cell(x)
            assert weight(net) == pytest.approx(1.0 - step, abs=1e-6)
    net, optimizer = line(loss_scale=own)
    _, gradients = One(net, optimizer, 8.0, return_grad=True)(x)
    assert gradients["weight"].item() == 2.0


class Product(ms.nn.Cell):
    """y = x @ weight, with a weight of 2s in a format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = ms.Parameter(torch.full((2, 2), 2.0, dtype=dtype))
        self.matmul = ms.ops.MatMul()

    def construct(self, x: Tensor) -> Any:
        return self.matmul(x, self.weight)


def test_a_network_built_in_fp16_trains_in_fp16_and_reports_overflow() -> None:
    net = Product(torch.float16)
    cell = WithScale(*training(net), ms.Tensor(8, dtype=ms.float16))
    found = []
    for value in (-float("inf"), 0.0, 40000.0, 10.0, float("inf")):
        _, overflow, _ = cell(torch.full((1, 2), value).half(), torch.zeros(1, 2).half())
        found.append(bool(overflow))
    assert found == [True, False, True, False, True]
    assert net.weight.dtype is torch.float16 and float(net.weight.detach().max()) < 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_a_network_built_low_trains_at_every_level(level: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = ms.nn.SequentialCell(ms.nn.Dense(4, 2), ms.nn.BatchNorm1d(2).to(dtype), Product(dtype), ms.nn.Dense(2, 2))
    net[0].to(dtype)
    optimizer = ms.nn.Momentum(net.trainable_params(), 0.01, 0.9)
    manager = ms.amp.FixedLossScaleManager(8.0, drop_overflow_update=False)
    cell = ms.amp.build_train_network(net, optimizer, ms.nn.MSELoss(), level, loss_scale_manager=manager)
    x, label = torch.randn(8, 4).to(dtype), torch.randn(8, 2)
    losses = [float(cell(x, label)) for _ in range(10)]
    assert losses[-1] < losses[0]
    wanted = {dtype, FP32} if level == "O0" else {FP32}
    assert {p.dtype for p in net.parameters()} == wanted and {p.dtype for p in net[3].parameters()} == {FP32}


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_a_level_casts_fp64_inputs(level: str) -> None:
    net = ms.nn.SequentialCell(ms.nn.Dense(4, 2))
    optimizer = ms.nn.Momentum(net.trainable_params(), 0.1, 0.9)
    manager = ms.amp.FixedLossScaleManager(8.0, drop_overflow_update=False)
    cell = ms.amp.build_train_network(net, optimizer, ms.nn.MSELoss(), level, loss_scale_manager=manager)
    assert cell(torch.ones(3, 4).double(), torch.ones(3, 2).double()).isfinite()


def test_a_learning_rate_may_be_a_tensor_of_one_number() -> None:
    net, _ = line()
    rates: list[Any] = [ms.Tensor(0.5), ms.Tensor([0.5]), ms.Parameter([0.5])]
    for rate in rates:
        optimizer = ms.nn.Momentum([{"params": net.trainable_params(), "lr": rate}], rate, 0.0)
        assert optimizer.get_lr() == 0.5
    with pytest.raises(TypeError, match="expected a number or a tensor of one"):
        ms.nn.SGD(net.trainable_params(), untyped.Tensor([0.5, 0.25]))


def network(*, recomputed: bool) -> tuple[Normed, Any]:
    torch.manual_seed(0)
    net = Normed()
    if recomputed:
        net.conv.recompute(mp_comm_recompute=False)
        net.bn.recompute()
    loss, optimizer = training(net)
    manager = ms.amp.FixedLossScaleManager(8.0, drop_overflow_update=False)
    cell = ms.amp.build_train_network(loss, optimizer, level="auto", loss_scale_manager=manager)
    x, label = torch.rand(2, 1, 4, 4), torch.rand(2, 3)
    return net, [cell(x, label) for _ in range(3)]


def test_a_recomputed_cell_trains_to_the_same_bits_and_moves_statistics_once() -> None:
    (plain, losses), (again, found) = (network(recomputed=recomputed) for recomputed in (False, True))
    assert [float(loss) for loss in found] == [float(loss) for loss in losses]
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with pytest.raises(ValueError, match="mp_comm_recompute, parallel"):
        again.recompute(mode=True)


def test_an_optimizer_alone_divides_by_its_loss_scale_and_decays_weights_unscaled() -> None:
    # MindSpore 2.10, measured: 1 - 0.5 * (8 + 0.8) / 8 = 0.45
    p = ms.Parameter([1.0])
    optimizer = ms.nn.Momentum([p], 0.5, 0.9, weight_decay=0.1, loss_scale=8.0)
    assert optimizer((torch.tensor([8.0]),)) is True
    assert float(p.detach()) == pytest.approx(0.45) and p.grad is None


@pytest.mark.parametrize("cell", [One, WithScale])
def test_a_trailing_sens_is_the_scale_of_this_step_alone(cell: Any) -> None:
    net, optimizer = line()
    step = cell(net, optimizer)
    seen: list[float] = []
    net.weight.register_hook(lambda g: seen.append(float(g)))
    out = step(torch.tensor([2.0]), ms.Tensor([64.0]))
    step(torch.tensor([2.0]), sens=32.0)
    assert seen == [128.0, 64.0]
    if cell is WithScale:
        assert [float(x) for x in out] == [2.0, 0.0, 64.0]
        assert float(step.scale_sense) == 2.0**24  # the update cell was left aside
        step(torch.tensor([2.0]))
        assert seen[-1] == 2.0 * 2.0**24


def test_a_bad_step_under_a_given_sens_changes_nothing_and_reports_overflow() -> None:
    net, optimizer = line()
    step = WithScale(net, optimizer)
    loss, overflow, scale = step(torch.tensor([float("inf")]), ms.Tensor([64.0]))
    assert bool(overflow) and float(scale) == 64.0 and weight(net) == 1.0 and float(step.scale_sense) == 2.0**24


def test_torch_networks_take_a_trailing_sens_too_before_and_after_a_flag() -> None:
    for flagged in (False, True):
        net = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        if flagged:
            ms.add_flags_recursive(net, bf16=True)
        step = One(net, torch.optim.SGD(net.parameters(), 0.1))
        step(torch.randn(4, 3), 8.0)
    with pytest.raises(TypeError):
        step(torch.randn(4, 3), 8.0, 9.0)


@pytest.mark.parametrize("given", ["tensor", "tensor1", "dynamic", "fixed", "older", "nothing"])
def test_a_scale_comes_as_a_tensor_an_update_cell_or_not_at_all(given: str) -> None:
    net, optimizer = line()
    step = {
        "tensor": lambda: WithScale(net, optimizer, ms.Tensor(8.0)),
        "tensor1": lambda: WithScale(net, optimizer, scale_sense=ms.Tensor([8.0])),
        "dynamic": lambda: WithScale(net, optimizer, ms.nn.DynamicLossScaleUpdateCell(8.0, 2, 2)),
        "fixed": lambda: WithScale(net, optimizer, ms.nn.FixedLossScaleUpdateCell(8.0)),
        "older": lambda: WithScale(net, optimizer, scale_update_cell=ms.nn.DynamicLossScaleUpdateCell(8.0, 2, 2)),
        "nothing": lambda: WithScale(net, optimizer),
    }[given]()
    start = 2.0**24 if given == "nothing" else 8.0
    good, bad = torch.tensor([0.0]), torch.tensor([float("nan")])
    moves = given in ("dynamic", "older")
    expected = [8.0, 16.0, 8.0] if moves else [start, start, 2.0**23 if given == "nothing" else start]
    results = [step(x) for x in (good, good, bad)]
    assert [float(scale) for _, _, scale in results] == expected
    assert [bool(overflow) for _, overflow, _ in results] == [False, False, True]


def test_the_scale_can_be_set_and_steps_go_on_from_there() -> None:
    net, optimizer = line()
    step = WithScale(net, optimizer, ms.nn.DynamicLossScaleUpdateCell(8.0, 2, 1))
    step.set_sense_scale(ms.Tensor([64.0]))
    assert float(step(torch.tensor([0.0]))[2]) == 128.0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda n, o: untyped.nn.TrainOneStepWithLossScaleCell(n, o, 8.0),
            TypeError,
            "scale_sense=8.0 is a float; expected a cell with get_loss",
        ),
        (lambda n, o: WithScale(n, o, untyped.nn.ReLU()), TypeError, "get_loss_scale"),
        (lambda n, o: WithScale(n, o, torch.ones(2)), ValueError, r"shape \(2,\); expected one number"),
        (lambda n, o: WithScale(n, o, torch.tensor(0.0)), ValueError, "above 0"),
        (lambda n, o: WithScale(n, o, torch.ones(1), scale_update_cell=untyped.nn.ReLU()), ValueError, "give one"),
        (lambda n, o: WithScale(n, o)(torch.ones(1), sens="8"), TypeError, "sens='8' is a str"),
        (lambda n, o: WithScale(n, o)(torch.ones(1), sens=float("inf")), ValueError, "sens=inf"),
        (
            lambda n, o: untyped.nn.TrainOneStepWithLossScaleCell(n, o).set_sense_scale(8.0),
            TypeError,
            "expected a tensor",
        ),
        (lambda n, o: One(n, o, 0), ValueError, "sens=0 makes every gradient 0"),
        (lambda n, o: untyped.nn.TrainOneStepCell(n, o, "8"), TypeError, "sens='8'"),
        (lambda n, o: untyped.nn.TrainOneStepCell(n, o, return_grad=1), TypeError, "return_grad=1"),
        (lambda n, o: untyped.nn.TrainOneStepCell("net", o), TypeError, "network is a str"),
        (lambda n, o: untyped.nn.TrainOneStepCell(n, [1]), TypeError, "optimizer is a list"),
        (
            lambda n, o: One(n, torch.optim.SGD([untyped.Parameter([1.0])], 0.1)),
            RuntimeError,
            "not a parameter of the mod",
        ),
    ],
)
def test_a_wrong_argument_is_refused(call: Callable[..., object], error: type[Exception], text: str) -> None:
    net, optimizer = line()
    with pytest.raises(error, match=text):
        call(net, optimizer)
    assert weight(net) == 1.0


def test_a_network_that_returns_no_loss_is_told_how_to_get_one() -> None:
    class Pair(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.fc = ms.nn.Dense(2, 2)

        def construct(self, x: Tensor) -> Any:
            return self.fc(x), x

    net = Pair()
    step = One(net, ms.nn.SGD(net.trainable_params()))
    with pytest.raises(TypeError, match="wrap it in WithLossCell"):
        step(torch.ones(1, 2))


def test_gradients_can_be_returned_unscaled_by_name() -> None:
    net = TorchNet()
    with_loss, optimizer = training(net)
    reference = TorchNet()
    reference.load_state_dict(net.state_dict())
    x, y = torch.rand(4, 1, 4, 4), torch.rand(4, 3)
    loss, gradients = One(with_loss, optimizer, 256.0, return_grad=True)(x, y)
    expected = nn.functional.mse_loss(reference(x), y)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()))
    assert set(gradients) == {f"backbone.{n}" for n, _ in net.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert torch.allclose(gradients[f"backbone.{name}"], parameter.grad, atol=1e-6)  # type: ignore[arg-type]


def test_a_loss_of_several_elements_is_minimised_as_their_sum_and_returned_whole() -> None:
    net = nn.Linear(4, 3)
    loss_fn = ms.nn.SoftmaxCrossEntropyWithLogits(sparse=True)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    before = net.weight.detach().clone()
    nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
    gradient = net.weight.grad
    net.zero_grad()
    step = One(ms.nn.WithLossCell(net, loss_fn), ms.nn.SGD(net.parameters(), 0.1))
    loss = step(x, y)
    assert loss.shape == (5,)
    assert torch.allclose(net.weight, before - 0.1 * gradient, atol=1e-6)  # type: ignore[operator]


def test_the_functional_style_gives_the_step_cells_numbers() -> None:
    def data(n: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(n)
        x = torch.rand(4, 1, 32, 32, generator=g)
        return (x * float("inf") if n in (3, 4, 9) else x), torch.rand(4, 10, generator=g)

    def fresh() -> tuple[LeNet5, Any]:
        torch.manual_seed(0)
        net = LeNet5().to_float(ms.float16)
        return net, ms.nn.Momentum(net.trainable_params(), 0.05, 0.9)

    net, optimizer = fresh()
    step = WithScale(ms.nn.WithLossCell(net, ms.nn.MSELoss()), optimizer, ms.nn.DynamicLossScaleUpdateCell(2**16, 2, 3))
    cell = [tuple(float(v) for v in step(*data(n))) for n in range(12)]

    net, optimizer = fresh()
    loss_fn, scaler = ms.nn.MSELoss(), ms.amp.DynamicLossScaler(2**16, 2, 3)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return scaler.scale(loss_fn(net(x), y))  # type: ignore[no-any-return]

    both = ms.value_and_grad(forward, None, optimizer.parameters)
    functional = []
    for n in range(12):
        loss, gradients = both(*data(n))
        loss, gradients = scaler.unscale(loss), scaler.unscale(gradients)
        finite = ms.amp.all_finite(gradients)
        if finite:
            optimizer(gradients)
        scaler.adjust(finite)
        functional.append((float(loss), float(~finite), float(scaler.scale_value)))
    for ours, theirs in zip(cell, functional, strict=True):
        assert ours[1:] == theirs[1:]
        assert ours[0] == pytest.approx(theirs[0], rel=1e-3, nan_ok=True)
    assert [flag for _, flag, _ in cell] == [float(n in (3, 4, 9)) for n in range(12)]


def test_a_users_own_step_built_from_the_public_parts_matches_the_built_in_one() -> None:
    class Clipped(ms.nn.TrainOneStepWithLossScaleCell):
        def construct(self, *inputs: Any, **named: Any) -> Any:
            loss = self.network(*inputs)
            scale = self.scale_sense.clone()
            status, scale = self.start_overflow_check(loss, scale)
            filled = ms.ops.ones_like(loss) * ms.ops.cast(scale, loss.dtype)
            gradients = self.grad(self.network, self.weights)(*inputs, filled)
            gradients = self.hyper_map(ms.ops.partial(lambda s, g: g / s, scale), gradients)
            gradients = self.grad_reducer(gradients)
            overflow = self.process_loss_scale(self.get_overflow_status(status, gradients))
            if not overflow:
                loss = ms.ops.depend(loss, optimizer(gradients))
            return loss, overflow, self.scale_sense.clone()

    curves = []
    for kind in (WithScale, Clipped):
        torch.manual_seed(0)
        net = Normed()
        with_loss, optimizer = training(net)
        step = kind(with_loss, optimizer, ms.nn.DynamicLossScaleUpdateCell(2.0**10, 2, 2))
        x, y = torch.rand(4, 1, 4, 4), torch.rand(4, 3)
        xs = [x, x, x * float("nan"), x]
        curves.append([tuple(float(v.detach()) for v in step(x, y)) for x in xs])
    for ours, theirs in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True)


def test_a_users_own_update_cell_moves_the_scale() -> None:
    class Halve(ms.nn.Cell):
        def get_loss_scale(self) -> float:
            return 64.0

        def construct(self, scale: Tensor, overflow: Tensor) -> Tensor:
            scale.mul_(0.5)
            return overflow

    net, optimizer = line()
    step = WithScale(net, optimizer, Halve())
    assert [float(step(torch.tensor([0.0]))[2]) for _ in range(3)] == [32.0, 16.0, 8.0]


def test_a_training_cell_saves_its_scale_counters_and_fp32_weights_and_goes_on() -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = Normed()
        with_loss, optimizer = training(net)
        return ms.amp.build_train_network(
            with_loss, optimizer, level="O2", loss_scale_manager=ms.amp.DynamicLossScaleManager(2**10, 2, 3)
        ), optimizer

    x, y = torch.rand(4, 1, 4, 4), torch.rand(4, 3)
    first, optimizer = make()
    for _ in range(4):
        first(x, y)
    saved, saved_optimizer = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    assert {v.dtype for k, v in saved.items() if k.endswith("weight")} == {FP32}
    second, optimizer = make()
    second.load_state_dict(saved)
    optimizer.load_state_dict(saved_optimizer)
    for _ in range(4):
        a, b = first(x, y), second(x, y)
        assert [float(v) for v in a] == [float(v) for v in b]


def test_bf16_trains_through_the_same_cells() -> None:
    net = Normed()
    with_loss, optimizer = training(net)
    step = ms.amp.build_train_network(with_loss, optimizer, level="O2", cast_model_type=BF16)
    losses = [float(step(torch.ones(2, 1, 4, 4), torch.ones(2, 3))[0]) for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_optimizers_are_torchs_with_mindspores_arguments() -> None:
    for make, theirs in (
        (
            lambda p: untyped.nn.SGD(p, 0.1, 0.9, 0.0, 0.01, True),
            lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.0, 0.01, True),
        ),
        (lambda p: untyped.nn.Momentum(p, 0.1, 0.9, 0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
        (lambda p: untyped.nn.Adam(p, 0.1, 0.8, 0.9), lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.9))),
    ):
        a, b = ms.Parameter([1.0, -2.0]), ms.Parameter([1.0, -2.0])
        ours, other = make([a]), theirs([b])  # type: ignore[no-untyped-call]
        for _ in range(3):
            gradient = torch.tensor([0.5, 1.0])
            ours((gradient,))
            b.grad = gradient.clone()
            other.step()
        assert torch.equal(a, b) and ours.learning_rate == 0.1
    with pytest.raises(TypeError, match="learning_rate=.*lr_scheduler"):
        ms.nn.SGD([ms.Parameter([1.0])], [0.1, 0.2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_scale=0.0"):
        ms.nn.SGD([ms.Parameter([1.0])], loss_scale=0.0)
    with pytest.raises(ValueError, match="1 parameters and was called with 2"):
        ours((gradient, gradient))
