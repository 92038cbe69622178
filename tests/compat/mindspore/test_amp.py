"""Levels, lists and build_train_network, and what they refuse."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import amp
from halfstep.compat.mindspore.amp import CONFIG
from tests.compat.mindspore.nets import BF16, FP16, FP32, LeNet5, Normed, TorchNet, formats, picture, training, untyped

LOW = {"fp16": FP16, "bf16": BF16}
NO_SCALE = "ignore:build_train_network:UserWarning"


def levels(net: nn.Module) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the formats of what a convolution, a batch norm and the whole network give."""
    seen = formats(net)
    return seen["conv"], seen["bn"], seen[""]


def exact_bn(net: Any) -> bool:
    """Return whether the batch norm computes in fp32: on a low input its output is the fp32 one, rounded once."""
    x = torch.randn(64, 4, 3, 3)
    low = formats(net)["conv"]
    x = x.to(low)
    wide = F.batch_norm(x.float(), None, None, net.bn.weight, net.bn.bias, True, 0.0, net.bn.eps)
    net.bn.train()
    return bool(torch.equal(net.bn(x).float(), wide.to(low).float()))


# --------------------------------------------------------------------------------------------- auto_mixed_precision


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("make", [Normed, TorchNet])
@pytest.mark.parametrize(
    ("level", "conv", "bn"), [("O0", "", ""), ("O1", "low", "fp32"), ("O2", "low", "low"), ("O3", "low", "low")]
)
def test_a_level_runs_each_layer_in_its_format(make: Any, dtype: str, level: str, conv: str, bn: str) -> None:
    net = make()
    assert amp.auto_mixed_precision(net, level, LOW[dtype]) is net
    low = LOW[dtype]
    found = levels(net)
    assert found[0] is (low if conv == "low" else FP32)
    assert found[1] is (low if bn == "low" else FP32)
    assert found[2] is FP32
    assert {p.dtype for p in net.parameters()} == {FP32}


@pytest.mark.parametrize("make", [Normed, TorchNet])
def test_auto_runs_products_low_and_sensitive_operators_fp32(make: Any) -> None:
    net = amp.auto_mixed_precision(make(), "auto")
    seen = formats(net)
    assert (seen["conv"], seen["bn"], seen["ln"], seen[""]) == (FP16, FP32, FP32, FP32)


def test_batch_and_layer_norms_compute_in_fp32_under_o2_and_low_under_o3() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 64).half() * 3
    for level, kept in (("O2", True), ("O3", False)):
        net = amp.auto_mixed_precision(Normed(), level)
        seen: list[torch.dtype] = []
        net.ln.register_forward_pre_hook(lambda m, a, seen=seen: seen.append(a[0].dtype))
        assert formats(net)["ln"] is FP16 and seen == [FP16]
        policy = hs.prepared_policy(net)
        assert policy is not None and (("class:LayerNorm", "fp32") in policy.modules) is kept
        if kept:
            assert exact_bn(net)
            assert torch.equal(net.ln(x), F.layer_norm(x.float(), (64,)).half())


def test_under_o1_what_is_not_a_product_computes_in_fp32() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            h = self.fc(x)
            return h, h.exp(), h + 1, torch.cat([h, h]), h.mean(), F.softmax(h, -1), F.relu(h), h.sigmoid()

    net = amp.auto_mixed_precision(Net(), "O1")
    inner: list[torch.dtype] = []
    net.fc.register_forward_hook(lambda m, a, o: inner.append(o.dtype))
    outputs = net(torch.randn(4, 8))
    assert inner == [FP16] and {o.dtype for o in outputs} == {FP32}
    low, exp = outputs[0], outputs[1]
    assert torch.equal(low, low.half().float()) and not torch.equal(exp, exp.half().float())


def test_auto_decorates_functions_and_methods_and_survives_exceptions() -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    low = amp.auto_mixed_precision(product, "auto", ms.bfloat16)
    a = torch.randn(4, 4)
    assert low(a, a).dtype is BF16 and product(a, a).dtype is FP32
    with pytest.raises(RuntimeError):
        low(a, torch.randn(3, 3))
    assert (a @ a).dtype is FP32
    assert amp.auto_mixed_precision(nn.Linear(4, 4).forward, "auto")(a).dtype is FP16


def test_cells_with_a_users_flag_keep_it_at_every_level() -> None:
    for level in ("O1", "O2", "O3", "auto"):
        net = LeNet5()
        net.fc2.to_float(ms.float32)
        seen = formats(amp.auto_mixed_precision(net, level))
        assert (seen["fc1"], seen["fc2"]) == (FP16, FP32), level
    net = LeNet5()
    net.fc2.to_float(ms.float16)
    net.fc3.to_float(ms.bfloat16)
    seen = formats(amp.auto_mixed_precision(net, "O2", ms.bfloat16))
    assert (seen["fc1"], seen["fc2"], seen["fc3"]) == (BF16, FP16, BF16)


def test_o0_returns_the_network_untouched_and_a_second_level_warns_and_changes_nothing() -> None:
    net = LeNet5()
    assert type(amp.auto_mixed_precision(net, "O0")) is LeNet5
    amp.auto_mixed_precision(net, "O2")
    with pytest.warns(UserWarning, match="converted with level 'O2' before and stays as it is; 'O3' is not applied"):
        amp.auto_mixed_precision(net, "O3")
    net.add_flags_recursive(fp16=False)  # the remedy in the warning
    assert formats(net)["fc1"] is FP32
    assert formats(amp.auto_mixed_precision(net, "O3", ms.bfloat16))["fc1"] is BF16


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: untyped.amp.auto_mixed_precision(len, "O2"), TypeError, "network is a builtin_function_or_method"),
        (lambda: untyped.amp.auto_mixed_precision(3, "auto"), TypeError, "network is a int"),
        (
            lambda: untyped.amp.auto_mixed_precision(LeNet5(), "O4"),
            ValueError,
            "amp_level='O4'; expected one of O0, O1, O2",
        ),
        (lambda: untyped.amp.auto_mixed_precision(LeNet5(), 2), TypeError, "amp_level=2 is a int"),
        (lambda: untyped.amp.auto_mixed_precision(LeNet5(), "O2", FP32), ValueError, "float16 or mstype.bfloat16"),
        (
            lambda: untyped.amp.auto_mixed_precision(LeNet5(), "O2", "fp16"),
            TypeError,
            "'fp16' is a str; expected a low",
        ),
        (lambda: untyped.amp.auto_mixed_precision(LeNet5(), level="O2"), TypeError, "level"),
    ],
)
def test_a_wrong_level_is_refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


# ------------------------------------------------------------------------------------------- lists, and one's own


def test_the_lists_are_mindspores_and_copies() -> None:
    white, black = amp.get_white_list(), amp.get_black_list()
    assert [kind.__name__ for kind in white] == [
        *("Conv1d", "Conv2d", "Conv3d", "Conv1dTranspose", "Conv2dTranspose", "Conv3dTranspose"),
        *("Dense", "LSTMCell", "RNNCell", "GRUCell", "Conv2D", "Conv3D", "Conv2DTranspose", "Conv3DTranspose"),
        *("Conv2DBackpropInput", "MatMul", "BatchMatMul", "PReLU", "ReLU", "Ger"),
    ]
    assert [kind.__name__ for kind in black] == ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm"]
    white.clear()
    black.append(nn.Softmax)
    assert len(amp.get_white_list()) == 20 and len(amp.get_black_list()) == 4


@pytest.mark.parametrize("make", [Normed, TorchNet])
def test_ones_own_white_list_lowers_what_it_names_and_nothing_else(make: Any) -> None:
    kind = ms.nn.Dense if make is Normed else nn.Linear
    seen = formats(amp.custom_mixed_precision(make(), white_list=[kind]))
    assert (seen["conv"], seen["fc"]) == (FP32, FP16)
    seen = formats(amp.custom_mixed_precision(make(), white_list=[ms.ops.Conv2D], dtype=ms.bfloat16))
    assert (seen["conv"], seen["fc"]) == (BF16, FP32)
    seen = formats(amp.custom_mixed_precision(make(), white_list=amp.get_white_list()))
    assert (seen["conv"], seen["fc"]) == (FP16, FP16)


def test_a_white_list_may_name_ones_own_cells() -> None:
    class Attention(ms.nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return F.softmax(x @ x.mT, -1)

    class Net(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.fc = Attention(), ms.nn.Dense(4, 4)

        def construct(self, x: Tensor) -> Tensor:
            return self.fc(self.attention(x))  # type: ignore[no-any-return]

    seen = formats(amp.custom_mixed_precision(Net(), white_list=[Attention]), torch.randn(4, 4))
    assert (seen["attention"], seen["fc"], seen[""]) == (FP16, FP32, FP32)


@pytest.mark.parametrize("make", [Normed, TorchNet])
def test_ones_own_black_list_keeps_what_it_names_in_fp32(make: Any) -> None:
    dense = ms.nn.Dense if make is Normed else nn.Linear
    torch.manual_seed(0)
    net: Any = amp.custom_mixed_precision(make(), black_list=[*amp.get_black_list(), dense])
    assert exact_bn(net)
    x = torch.randn(2, 64).half()
    assert torch.equal(net.fc(x), F.linear(x.float(), net.fc.weight, net.fc.bias).half())
    assert formats(net)["conv"] is FP16
    assert formats(amp.custom_mixed_precision(make(), black_list=[]))["bn"] is FP16


def test_a_pooling_cell_of_a_black_list_leaves_the_others_low() -> None:
    net = ms.nn.SequentialCell(ms.nn.Conv2d(1, 2, 3), ms.nn.MaxPool2d(2))
    seen = formats(amp.custom_mixed_precision(net, black_list=[ms.nn.MaxPool2d]), torch.randn(1, 1, 4, 4))
    assert (seen["0"], seen[""]) == (FP16, FP32)


def test_a_cell_of_a_black_list_gives_the_format_that_it_takes_and_its_parts_give_fp32() -> None:
    class Block(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.fc = ms.nn.BatchNorm1d(4), ms.nn.Dense(4, 4)

        def construct(self, x: Tensor) -> Tensor:
            return self.fc(self.bn(x))  # type: ignore[no-any-return]

    net = ms.nn.SequentialCell(Block(), ms.nn.Dense(4, 2))
    x = torch.randn(8, 4)
    seen = formats(amp.custom_mixed_precision(net, black_list=[Block, ms.nn.BatchNorm1d], dtype=BF16), x)
    assert [seen[name] for name in ("0.bn", "0.fc", "0", "1", "")] == [FP32, FP32, FP32, BF16, FP32]
    net.add_flags_recursive(bf16=False)  # takes the level away
    assert set(formats(net, x).values()) == {FP32}


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({}, ValueError, "was given neither"),
        ({"white_list": [], "black_list": []}, ValueError, "was given both"),
        ({"white_list": (nn.Linear,)}, TypeError, "is a tuple, not a list"),
        ({"white_list": [nn.Linear(2, 2)]}, TypeError, "classes \\(not instances\\)"),
        ({"white_list": [Tensor]}, TypeError, "white_list contains"),
        ({"black_list": [ms.ops.MatMul]}, TypeError, "expected classes \\(not instances\\) of Module"),
        ({"black_list": [], "dtype": FP32}, ValueError, "float16 or mstype.bfloat16"),
    ],
)
def test_a_wrong_list_is_refused(kwargs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        amp.custom_mixed_precision(TorchNet(), **kwargs)


# ------------------------------------------------------------------------------------------- build_train_network


def test_the_signature_is_mindspores() -> None:
    parameters = inspect.signature(amp.build_train_network).parameters
    assert list(parameters) == ["network", "optimizer", "loss_fn", "level", "boost_level", "kwargs"]
    assert (parameters["loss_fn"].default, parameters["level"].default, parameters["boost_level"].default) == (
        None,
        "O0",
        "O0",
    )


def test_the_table_of_levels_is_mindspores() -> None:
    assert CONFIG == {
        "O0": (False, FP32, False),
        "O1": (False, FP32, False),
        "O2": (True, FP16, True),
        "O3": (False, FP16, False),
        "auto": (False, FP32, False),
    }


CASTS = {None: None, "f32": FP32, "f16": FP16, "bf16": BF16}


@pytest.mark.filterwarnings(NO_SCALE)
@pytest.mark.parametrize(
    ("level", "cast", "keep", "manager"),
    list(itertools.product(CONFIG, CASTS, (None, True, False), ("default", "none", "fixed"))),
)
def test_every_combination_casts_and_scales_as_in_mindspores_order_of_work(
    level: str, cast: str | None, keep: bool | None, manager: str
) -> None:
    kwargs: dict[str, Any] = {}
    if cast is not None:
        kwargs["cast_model_type"] = CASTS[cast]
    if keep is not None:
        kwargs["keep_batchnorm_fp32"] = keep
    if manager != "default":
        kwargs["loss_scale_manager"] = None if manager == "none" else amp.FixedLossScaleManager(8.0)
    net = Normed()
    _, optimizer = training(net)
    step = amp.build_train_network(net, optimizer, ms.nn.MSELoss(), level, **kwargs)
    assert step.training and net.training

    chosen = CASTS[cast] if cast is not None else CONFIG[level][1]
    if chosen is not FP32:  # whatever the level
        expected = (chosen, chosen)
    elif level in ("O1", "auto"):
        expected = (FP16, FP32)
    else:  # O0; O2 and O3 with float32 cast nothing
        expected = (FP32, FP32)
    assert levels(net)[:2] == expected
    if chosen is not FP32:
        kept = keep if keep is not None else CONFIG[level][0]
        policy = hs.prepared_policy(net)
        assert policy is not None and (("class:BatchNorm2d", "fp32") in policy.modules) is kept
    scaled = manager == "fixed" or (manager == "default" and level == "O2")
    kind = ms.nn.TrainOneStepWithLossScaleCell if scaled else ms.nn.TrainOneStepCell
    assert type(step) is kind
    if isinstance(step, ms.nn.TrainOneStepWithLossScaleCell):
        assert float(step.scale_sense) == (8.0 if manager == "fixed" else 2.0**24)


@pytest.mark.filterwarnings(NO_SCALE)
@pytest.mark.parametrize("level", list(CONFIG))
@pytest.mark.parametrize("inside", [True, False])
def test_every_level_learns_with_the_loss_inside_the_network_and_outside(level: str, inside: bool) -> None:
    torch.manual_seed(0)
    net = Normed()
    with_loss, optimizer = training(net)
    if inside:
        step = amp.build_train_network(with_loss, optimizer, level=level)
    else:
        step = amp.build_train_network(net, optimizer, ms.nn.MSELoss(), level=level)
    x, y = torch.rand(8, 1, 4, 4), torch.rand(8, 3)
    losses = []
    for _ in range(40):
        out = step(x, y)
        losses.append(out[0] if isinstance(out, tuple) else out)
    assert losses[0].dtype is FP32
    assert float(losses[-1]) < 0.3 * float(losses[0])


def test_fp16_without_a_scale_warns_and_bf16_does_not() -> None:
    for kwargs in ({"level": "O3"}, {"level": "O0", "cast_model_type": FP16}, {"level": "auto"}):
        net = Normed()
        with pytest.warns(UserWarning, match="fp16 is trained without a loss scale.*DynamicLossScaleManager"):
            amp.build_train_network(net, training(net)[1], ms.nn.MSELoss(), **kwargs)
    net = Normed()
    amp.build_train_network(net, training(net)[1], ms.nn.MSELoss(), "O3", cast_model_type=BF16)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"network": 3}, TypeError, "network is a int"),
        ({"optimizer": None}, TypeError, "optimizer is a NoneType"),
        ({"loss_fn": 3}, TypeError, "loss_fn=3"),
        ({"level": 2}, TypeError, "level=2 is a int"),
        ({"level": "O5"}, ValueError, "level='O5'; expected one of O0, O1, O2, O3, auto"),
        ({"level": "Auto"}, ValueError, "did you mean 'auto'"),
        ({"boost_level": "O1"}, ValueError, "boost"),
        ({"boost_level": "O7"}, ValueError, "boost_level='O7'"),
        ({"cast_network_type": FP16}, ValueError, "unsupported argument cast_network_type.*did you mean 'cast_model"),
        ({"cast_model_type": torch.float64}, ValueError, "cast_model_type=torch.float64"),
        ({"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32=1"),
        ({"loss_scale_manager": 128.0}, TypeError, "loss_scale_manager=128.0 is a float"),
    ],
)
def test_a_wrong_argument_is_refused_and_the_network_stays_as_it_was(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    net = Normed()
    arguments: dict[str, Any] = {"network": net, "optimizer": training(net)[1], "loss_fn": ms.nn.MSELoss()}
    with pytest.raises(error, match=text):
        amp.build_train_network(**{**arguments, "level": "O2", **change})
    assert type(net) is Normed


def test_an_optimizer_of_another_network_is_refused_before_anything_changes() -> None:
    net = Normed()
    with pytest.raises(ValueError, match="not the network's; build it from network.trainable_params"):
        amp.build_train_network(net, training(Normed())[1], ms.nn.MSELoss(), "O2")
    assert type(net) is Normed


def test_amp_has_two_addresses_and_the_same_objects() -> None:
    from halfstep.compat.mindspore.train import amp as older

    assert older.__all__ == amp.__all__
    assert all(getattr(older, name) is getattr(amp, name) for name in amp.__all__)


def test_torch_optimizers_and_pictures_work_too() -> None:
    net = TorchNet()
    step = amp.build_train_network(net, torch.optim.AdamW(net.parameters()), nn.MSELoss(), "O2")
    loss, overflow, scale = step(picture(net), torch.rand(2, 3))
    assert loss.dtype is FP32 and bool(overflow) == (float(scale) < 2.0**24)
