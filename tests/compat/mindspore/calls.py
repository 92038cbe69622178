"""Calls of MindSpore's names with MindSpore's arguments, and what MindSpore 2.10 gives for them on a CPU."""

# ruff: noqa: E501 - a table, one call a line

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore.common import initializer as start
from tests.compat.calls import Call

__all__ = ["CALLS"]

untyped: Any = ms
"""Without the types: calls take what MindSpore takes."""
Parameter, Tensor, amp, nn, ops = untyped.Parameter, untyped.Tensor, untyped.amp, untyped.nn, untyped.ops
P = ops.operations


def t(data: Any, dtype: Any = None) -> Any:
    return Tensor(np.array(data, np.float32)) if dtype is None else Tensor(data, dtype)


X = t(np.arange(16).reshape(1, 1, 4, 4))
Q = X[:, :, :2, :2]
BATCH = (t([[1.0, 2.0], [3.0, 4.0]]), t([[0.0], [1.0]]))


def network(**words: Any) -> Any:
    return nn.Dense(2, 1, weight_init="ones", bias_init="zeros", **words)


def recomputed() -> tuple[Any, Any]:
    net = Own()
    net.recompute()
    return net(t([[2.0]])), np.array([[4.0]], np.float32)


def momentum(net: Any, **words: Any) -> Any:
    return nn.Momentum(net.trainable_params(), learning_rate=0.01, momentum=0.9, **words)


def loss_of(net: Any) -> Any:
    return nn.WithLossCell(net, nn.MSELoss())


def stepped(make: Callable[[Any], Any]) -> float:
    """Return a weight that began at 1 after steps with the gradients 0.5 and -1."""
    weight = Parameter(t([1.0]), name="w")
    optimizer = make([weight])
    for gradient in (0.5, -1.0):
        optimizer((t([gradient]),))
    return float(weight.detach())


def torch_adam() -> float:
    weight, first, second = 1.0, 0.0, 0.0
    for step, gradient in enumerate((0.5, -1.0), 1):
        gradient += 0.1 * weight
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        weight -= 0.1 * (first / (1 - 0.8**step)) / (math.sqrt(second / (1 - 0.9**step)) + 1e-3)
    return weight


def spread(name: str) -> Call:
    def call() -> tuple[Any, Any]:
        torch.manual_seed(0)
        made = start.initializer(name, [200, 300], ms.float32)
        measured = {"uniform": 0.0404, "xavier_uniform": 0.0633, "xavier_normal": 0.063, "he_uniform": 0.0815,
                    "he_normal": 0.0819, "TruncatedNormal": 0.00998, "normal": 0.00998}  # fmt: skip
        return abs(float(made.std()) / measured[name] - 1) < 0.02, True

    return call


def normed(training: bool = True, **words: Any) -> tuple[Any, Any, Any]:
    norm = nn.BatchNorm2d(1, momentum=0.9, **words).set_train(training)
    return norm(Q), norm.moving_mean, norm.moving_variance


BATCH_NORMAL = np.array([[[[-1.2126768, -0.7276061], [0.7276061, 1.2126768]]]], np.float32)


def not_decayed() -> tuple[Any, Any]:
    """Weight decay leaves gamma and beta alone, and gradients go by the order of the parameters."""
    net = nn.SequentialCell(nn.BatchNorm1d(1), nn.Dense(1, 1, weight_init=1.0, bias_init=0.0))
    net[0].gamma.data.fill_(2.0)
    params = net.trainable_params()
    optimizer = nn.SGD(params, 0.1, weight_decay=0.5)
    optimizer(tuple(torch.full_like(p, float(i)) for i, p in enumerate(params)))
    return [float(p.detach()) for p in params], [2.0, -0.1, 0.75, -0.3]


def order_params() -> tuple[Any, Any]:
    a, b = Parameter(t([1.0])), Parameter(t([1.0]))
    groups = [{"params": [b], "lr": 0.5}, {"params": [a]}, {"order_params": [a, b]}]
    optimizer = nn.SGD(groups, learning_rate=0.1)
    optimizer((t([1.0]), t([2.0])))
    return [float(a.detach()), float(b.detach())], [0.9, 0.0]


def trained(level: str, **words: Any) -> tuple[Any, Any]:
    """Return what one training step gives, and the weights after it."""
    net = network()
    cell = amp.build_train_network(net, momentum(net), nn.MSELoss(), level, **words)
    return cell(*BATCH), [*net.weight.flatten().tolist(), net.bias.item()]


# output [3, 7], differences [3, 6], loss 22.5; gradients: weight [21, 30], bias 9
AFTER = [1 - 0.21, 1 - 0.3, -0.09]


def one_step() -> tuple[Any, Any]:
    net = network()
    cell = nn.TrainOneStepCell(loss_of(net), momentum(net), sens=4.0, return_grad=True)
    loss, grads = cell(*BATCH)
    named = {name.split(".")[-1]: gradient for name, gradient in grads.items()}
    return (loss, named, net.bias), (22.5, {"bias": [9.0], "weight": np.array([[21.0, 30.0]], np.float32)}, [-0.09])


def scaled_step(method: str = "") -> tuple[Any, Any]:
    net = network()
    cell = nn.TrainOneStepWithLossScaleCell(loss_of(net), momentum(net), nn.DynamicLossScaleUpdateCell(8.0, 2, 1))
    if method == "set_sense_scale":
        cell.set_sense_scale(Tensor(32.0))
        return cell(*BATCH), (22.5, False, 64.0)
    if method == "start_overflow_check":
        return cell.start_overflow_check(0, "input"), (False, "input")
    if method == "get_overflow_status":
        status = torch.tensor(False)
        bad, good = (t([1.0, np.inf]),), (t([1.0]),)
        return [cell.get_overflow_status(status, grads) for grads in (bad, good)], [True, False]
    if method == "process_loss_scale":
        cell.process_loss_scale(torch.tensor(True))
        return cell.scale_sense, 4.0
    first = cell(*BATCH)
    bad = cell(t([[np.inf, 0.0]]), t([[0.0]]))
    return (first, bad[1:], net.bias), ((22.5, False, 16.0), (True, 8.0), [-0.09])


def fixed_cell() -> tuple[Any, Any]:
    cell, scale = nn.FixedLossScaleUpdateCell(64.0), Tensor(64.0)
    return (cell(scale, torch.tensor(True)), scale, cell.get_loss_scale()), (True, 64.0, 64.0)


def dynamic_cell() -> tuple[Any, Any]:
    cell, scale, seen = nn.DynamicLossScaleUpdateCell(64.0, 2, 2), Tensor(64.0), []
    for overflow in (True, False, False, False):
        cell(scale, torch.tensor(overflow))
        seen.append(float(scale))
    return seen, [32.0, 32.0, 64.0, 64.0]


def manager(drop: bool = True) -> tuple[Any, Any]:
    made = amp.FixedLossScaleManager(128.0, drop)
    made.update_loss_scale(True)
    return (made.get_loss_scale(), made.get_drop_overflow_update(), made.get_update_cell() is None), (
        128.0,
        drop,
        not drop,
    )


def dynamic_manager() -> tuple[Any, Any]:
    made = amp.DynamicLossScaleManager(8, 2, 1)
    seen = []
    for overflow in (True, False, True):
        made.update_loss_scale(overflow)
        seen.append(made.get_loss_scale())
    return (seen, made.get_update_cell().get_loss_scale()), ([4.0, 8.0, 4.0], 4.0)


class Doubler(ms.amp.LossScaler):
    """A loss scaler of one's own."""

    def scale(self, inputs: Any) -> Any:
        return inputs * 2

    def unscale(self, inputs: Any) -> Any:
        return inputs / 2

    def adjust(self, grads_finite: Any) -> bool:
        return False


class Keeper(ms.amp.LossScaleManager):
    """A manager of one's own."""

    def get_loss_scale(self) -> float:
        return 2.0

    def update_loss_scale(self, overflow: bool) -> None:
        pass

    def get_update_cell(self) -> Any:
        return nn.FixedLossScaleUpdateCell(2.0)


def static_scaler() -> tuple[Any, Any]:
    scaler = amp.StaticLossScaler(scale_value=2**10)
    return (scaler.scale(t([1.0])), scaler.unscale((t([1024.0]), t([2048.0]))), scaler.adjust(False)), (
        [1024.0], ([1.0], [2.0]), False,
    )  # fmt: skip


def dynamic_scaler() -> tuple[Any, Any]:
    scaler = amp.DynamicLossScaler(scale_value=1024, scale_factor=2, scale_window=50)
    scaler.counter = Tensor(49, dtype=ms.int32)
    grown = (scaler.adjust(Tensor(True)), scaler.scale_value, scaler.counter)
    scaler.counter = 3
    scaler.adjust(Tensor(False))
    return (*grown, scaler.scale_value, scaler.counter, scaler.scale(t([1.0]))), (True, 2048.0, 0, 1024.0, 0, [1024.0])


def formats(level: str, low: Any = ms.float16) -> list[Any]:
    """Return the formats in which a Dense and a BatchNorm compute, and that of the result."""
    seen: list[Any] = []

    class Seen(ms.nn.Cell):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def construct(self, x: Any) -> Any:
            y = self.inner(x)
            seen.append(y.dtype)
            return y

    net = nn.SequentialCell(Seen(nn.Dense(2, 2)), Seen(nn.BatchNorm1d(2)))
    out = amp.auto_mixed_precision(net, level, low)(t([[1.0, 2.0]]))
    return [*seen, out.dtype]


class Own(ms.nn.Cell):
    """A cell with a flag."""

    def construct(self, x: Any) -> Any:
        return x @ x


def flagged(method: str, **words: Any) -> Any:
    outer = nn.SequentialCell(Own())
    inner = outer[0]
    seen: list[Any] = []

    def construct(x: Any) -> Any:
        seen.append((x @ x).dtype)
        return x

    inner.construct = construct
    if method == "to_float":
        outer.to_float(words["dst_type"])
    else:
        getattr(outer, method)(**words)
    outer(torch.eye(2))
    return seen


def as_functions(name: str, *args: Any, **words: Any) -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    seen: list[Any] = []
    net[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert getattr(ms, name)(net, *args, **words) is net
    net(torch.eye(2))
    return seen


def model(**words: Any) -> Any:
    net = network()
    return ms.train.Model(net, nn.MSELoss(), momentum(net), **words), net


def model_trains() -> tuple[Any, Any]:
    made, net = model(metrics={"bias": lambda output, label: output.mean()})
    seen: list[Any] = []
    made.train(
        2, [BATCH], callbacks=[lambda p: seen.append((p.epoch, p.step))], dataset_sink_mode=False, initial_epoch=1
    )
    bias = net.bias.item()
    evaluated = made.eval([(t([[0.0, 0.0]]), t([[1.0]]))])
    return (seen, bias, evaluated, made.predict(t([[0.0, 0.0]]))), (
        [(2, 1)], -0.09, {"bias": -0.09, "loss": 1.09**2}, np.array([[-0.09]], np.float32),
    )  # fmt: skip


def with_indexes() -> tuple[Any, Any]:
    class Turned(ms.nn.Cell):
        def construct(self, data: Any, label: Any) -> Any:
            return label, data, data.sum()

    made = ms.train.Model(network(), nn.MSELoss(), eval_network=Turned(), eval_indexes=[2, 1, 0])
    return made.eval([BATCH]), {"loss": 10.0}


def square(a: Any) -> Any:
    return a * a


def hyper() -> tuple[Any, Any]:
    return ops.HyperMap()(P.Add(), [t([1.0]), t([2.0])], (t([2.0]), t([3.0]))), ([3.0], [5.0])


def flag_set() -> tuple[Any, Any]:
    return nn.Dense(1, 1).add_flags(fp16=True).get_flags(), {"fp16": True, "bf16": False}


LOGITS = t([[1.0, 2.0]])

CALLS: dict[str, Call] = {
    # layers
    "nn.Dense": lambda: (network()(BATCH[0]), np.array([[3.0], [7.0]], np.float32)),
    "nn.Dense in order": lambda: (nn.Dense(2, 1, "ones", 2.0, True, "relu")(-BATCH[0]), np.array([[0.0], [0.0]], np.float32)),
    "nn.Dense low": lambda: (nn.Dense(2, 1, dtype=ms.float16).weight.dtype, torch.float16),
    "nn.Conv2d": lambda: (nn.Conv2d(1, 1, 3, weight_init="ones")(Q), np.full((1, 1, 2, 2), 10, np.float32)),
    "nn.Conv2d in order": lambda: (
        nn.Conv2d(1, 1, 2, 2, "pad", 1, 1, 1, True, "ones", "ones", "NCHW")(Q), np.array([[[[1, 2], [5, 6]]]], np.float32),
    ),
    "nn.Conv2dTranspose": lambda: (
        nn.Conv2dTranspose(1, 1, 3, 2, "same", weight_init="ones")(Q),
        np.array([[[[0, 0, 1, 1], [0, 0, 1, 1], [4, 4, 10, 6], [4, 4, 9, 5]]]], np.float32),
    ),
    "nn.Conv2dTranspose in order": lambda: (
        nn.Conv2dTranspose(1, 1, 3, 2, "pad", 1, 1, weight_init="ones")(Q),
        np.array([[[[0, 1, 1, 0], [4, 10, 6, 0], [4, 9, 5, 0], [0, 0, 0, 0]]]], np.float32),
    ),
    "nn.Conv1dTranspose": lambda: (
        nn.Conv1dTranspose(1, 1, 3, 2, "valid", weight_init="ones")(Q.reshape(1, 1, 4)),
        np.array([[[0, 0, 1, 1, 5, 4, 9, 5, 5]]], np.float32),
    ),
    "nn.Conv3dTranspose": lambda: (
        nn.Conv3dTranspose(1, 1, 2, 1, "valid", weight_init="ones")(ops.ones_like(X[:, :, :1, :2].reshape(1, 1, 1, 1, 2))),
        np.array([[[[[1, 2, 1]] * 2] * 2]], np.float32),
    ),
    "nn.ReLU": lambda: (nn.ReLU()(t([-1.0, 2.0])), [0.0, 2.0]),
    "nn.MaxPool2d": lambda: (nn.MaxPool2d(2)(X)[0, 0, 0], [5.0, 6.0, 7.0]),
    "nn.MaxPool2d padded": lambda: (
        nn.MaxPool2d(2, 2, "pad", 1)(X), np.array([[[[0, 2, 3], [8, 10, 11], [12, 14, 15]]]], np.float32),
    ),
    "nn.MaxPool2d dilated": lambda: (
        nn.MaxPool2d(2, 2, "pad", 0, dilation=2, ceil_mode=False)(X), np.array([[[[10]]]], np.float32),
    ),
    "nn.AvgPool2d": lambda: (nn.AvgPool2d(2)(X)[0, 0, 0], [2.5, 3.5, 4.5]),
    "nn.AvgPool2d same": lambda: (nn.AvgPool2d(3, 2, "same")(X), np.array([[[[5, 6.5], [11, 12.5]]]], np.float32)),
    "nn.AvgPool2d padded": lambda: (nn.AvgPool2d(2, 2, "pad", 1)(X)[0, 0, 0], [0.0, 0.75, 0.75]),
    "nn.AvgPool2d of the inside": lambda: (nn.AvgPool2d(2, 2, "pad", 1, False, False)(X)[0, 0, 0], [0.0, 1.5, 3.0]),
    "nn.AvgPool2d divided": lambda: (nn.AvgPool2d(2, 2, "pad", 0, divisor_override=2)(X)[0, 0, 0], [5.0, 9.0]),
    "nn.Flatten": lambda: (nn.Flatten()(X).shape, (1, 16)),
    "nn.BatchNorm2d": lambda: (normed(), (BATCH_NORMAL, [0.25], [1.4666667])),
    "nn.BatchNorm2d by running statistics": lambda: (
        nn.BatchNorm2d(1, moving_mean_init="ones", moving_var_init="ones", gamma_init=t([2.0]))(Q),
        np.array([[[[-1.99999, 0.0], [5.99997, 7.99996]]]], np.float32),
    ),
    "nn.BatchNorm2d in order": lambda: (
        nn.BatchNorm2d(1, 1e-5, 0.9, True, 1, 0, "zeros", "ones", False, "NCHW")(Q), np.array([[[[0, 1], [4, 5]]]]) / 1.000005,
    ),
    "nn.BatchNorm2d told to use those of the batch": lambda: (
        normed(training=False, use_batch_statistics=True), (BATCH_NORMAL, [0.25], [1.4666667]),
    ),
    "nn.BatchNorm2d not trained": lambda: (
        [p.requires_grad for p in nn.BatchNorm2d(1, affine=False).parameters()], [False, False],
    ),
    "nn.LayerNorm": lambda: (
        nn.LayerNorm((2, 2), 1, 1)(t([[[1, 2], [3, 5]]])),
        np.array([[[-1.1832159, -0.5070926], [0.16903085, 1.5212775]]], np.float32),
    ),
    "nn.LayerNorm epsilon": lambda: (nn.LayerNorm([2]).eps, 1e-7),
    "nn.GroupNorm": lambda: (
        nn.GroupNorm(1, 2, 1e-5, True, "ones", "ones")(t(np.arange(8).reshape(1, 2, 2, 2)))[0, 0, 0], [-0.5275238, -0.0910884],
    ),
    "nn.Embedding": lambda: (nn.Embedding(4, 2, True, "ones")(t([1], ms.int32)), np.array([[1, 1]], np.float32)),
    "nn.Embedding padded": lambda: (nn.Embedding(4, 2, False, 3.0, padding_idx=1)(t([1, 2], ms.int32)), np.array([[0, 0], [3, 3]], np.float32)),
    "nn.Embedding small": lambda: (abs(float(nn.Embedding(1000, 10).embedding_table.detach().std()) - 0.01) < 1e-3, True),
    "nn.Dropout": lambda: (nn.Dropout(0.8)(t([1.0])), [1.0]),
    "nn.Dropout training": lambda: (sorted(set(nn.Dropout(p=0.5).set_train()(torch.ones(99)).tolist())), [0.0, 2.0]),
    # losses
    "nn.MSELoss": lambda: (nn.MSELoss()(t([1.0, 3.0]), t([0.0, 0.0])), 5.0),
    "nn.L1Loss": lambda: (nn.L1Loss()(t([1.0]), t([3.0])), 2.0),
    "nn.SoftmaxCrossEntropyWithLogits": lambda: (nn.SoftmaxCrossEntropyWithLogits()(LOGITS, t([[0.3, 0.7]])), [0.6132617]),
    "nn.SoftmaxCrossEntropyWithLogits sparse": lambda: (
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")(LOGITS, t([1], ms.int32)), 0.3132617,
    ),
    "nn.BCEWithLogitsLoss": lambda: (
        nn.BCEWithLogitsLoss("mean", t([2.0, 1.0]), t([3.0, 1.0]))(t([[0.5, -0.5]]), t([[1.0, 0.0]])), 1.6592695,
    ),
    # optimizers
    "nn.Momentum": lambda: (stepped(lambda p: nn.Momentum(p, 0.1, 0.5, 0.1, 2.0)), 0.98785),
    "nn.Momentum nesterov": lambda: (stepped(lambda p: nn.Momentum(p, 0.1, 0.5, use_nesterov=True)), 1.0625),  # the formula of its
    # page; MindSpore's CPU kernel takes no notice of use_nesterov
    "nn.SGD": lambda: (stepped(lambda p: nn.SGD(p, 0.1, 0.5, 0.2, 0.1)), 0.98248),
    "nn.SGD nesterov": lambda: (stepped(lambda p: nn.SGD(p, 0.1, 0.5, 0.0, 0.1, True)), 1.03135),
    "nn.SGD scaled": lambda: (stepped(lambda p: nn.SGD(p, 0.1, loss_scale=4.0)), 1.0125),
    "nn.Adam": lambda: (stepped(lambda p: nn.Adam(p, 0.1, 0.8, 0.9, 1e-3, False, False, 0.1, 1.0)), torch_adam()),
    "nn.AdamWeightDecay": lambda: (stepped(lambda p: nn.AdamWeightDecay(p, 0.1, 0.8, 0.9, 1e-3, 0.1)), 0.9520685),
    "nn.Optimizer": not_decayed,
    "nn.Optimizer order_params": order_params,
    # cells
    "nn.Cell": lambda: (Own()(t([[2.0]])), np.array([[4.0]], np.float32)),
    "nn.Cell.recompute": recomputed,
    "nn.Cell.to_float": lambda: (flagged("to_float", dst_type=ms.bfloat16), [torch.bfloat16]),
    "nn.Cell.add_flags": lambda: (flagged("add_flags", fp16=True), [torch.float16]),
    "nn.Cell.add_flags_recursive": lambda: (flagged("add_flags_recursive", fp32=True, fp16=True), [torch.float32]),
    "nn.Cell.get_flags": flag_set,
    "to_float": lambda: (as_functions("to_float", ms.float16), [torch.float16]),
    "add_flags": lambda: (as_functions("add_flags", fp16=False), [torch.float32]),
    "add_flags_recursive": lambda: (as_functions("add_flags_recursive", bf16=True), [torch.bfloat16]),
    "nn.WithLossCell": lambda: (loss_of(network())(*BATCH), 22.5),
    "nn.WithEvalCell": lambda: (
        nn.WithEvalCell(network(), nn.MSELoss(), add_cast_fp32=True)(*BATCH)[:2], (22.5, np.array([[3.0], [7.0]], np.float32)),
    ),
    "nn.TrainOneStepCell": one_step,
    "nn.TrainOneStepWithLossScaleCell": scaled_step,
    **{
        f"nn.TrainOneStepWithLossScaleCell.{name}": functools.partial(scaled_step, name)
        for name in ("set_sense_scale", "start_overflow_check", "get_overflow_status", "process_loss_scale")
    },
    "nn.DynamicLossScaleUpdateCell": dynamic_cell,
    "nn.FixedLossScaleUpdateCell": fixed_cell,
    # amp
    "amp.build_train_network": lambda: (trained("O0"), (22.5, AFTER)),
    "amp.build_train_network scaled": lambda: (
        trained("O2", loss_scale_manager=amp.FixedLossScaleManager(1024.0), keep_batchnorm_fp32=False),
        ((22.5, False, 1024.0), AFTER),
    ),
    "amp.auto_mixed_precision": lambda: (
        [formats(level) for level in ("O0", "O2", "O3")],
        [[torch.float32] * 3, *[[torch.float16, torch.float16, torch.float32]] * 2],
    ),
    "amp.custom_mixed_precision": lambda: (
        amp.custom_mixed_precision(network(), black_list=[nn.Dense], dtype=ms.bfloat16)(BATCH[0]), np.array([[3.0], [7.0]], np.float32),
    ),
    "amp.get_white_list": lambda: ((nn.Dense in amp.get_white_list(), len(amp.get_white_list())), (True, 20)),
    "amp.get_black_list": lambda: (
        amp.get_black_list(), [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm],
    ),
    "amp.LossScaler": lambda: (Doubler().scale(t([2.0])), [4.0]),
    "amp.StaticLossScaler": static_scaler,
    "amp.DynamicLossScaler": dynamic_scaler,
    "amp.all_finite": lambda: ([amp.all_finite((t([1.0]), t([x]))) for x in (1.0, np.nan)], [True, False]),
    "amp.LossScaleManager": lambda: (
        trained("O0", loss_scale_manager=Keeper())[0], (22.5, False, 2.0),
    ),
    "amp.FixedLossScaleManager": manager,
    "amp.FixedLossScaleManager without drops": lambda: manager(False),
    "amp.DynamicLossScaleManager": dynamic_manager,
    "train.amp": lambda: (ms.train.amp.build_train_network is amp.build_train_network, True),
    "train.Model": model_trains,
    "train.Model with indexes": with_indexes,
    # functions and primitives
    "ops.operations": lambda: (
        P.Conv2D(1, 2)(X, ops.ones_like(X[:, :, :2, :2])).shape, (1, 1, 3, 3),
    ),
    "ops.operations transposed": lambda: (
        P.Conv2DTranspose(1, 2, "valid", 0, None, 1, 2)(Q, ops.ones_like(Q), (1, 1, 4, 4))[0, 0, 3], [4.0, 4.0, 5.0, 5.0],
    ),
    "ops.operations in three dimensions": lambda: (
        P.Conv3DTranspose(1, 2, 1)(t(np.ones((1, 1, 1, 1, 1))), t(np.ones((1, 2, 1, 1, 1)))).shape, (1, 2, 1, 1, 1),
    ),
    "ops.operations reduced": lambda: (P.ReduceSum(True)(t([[1, 2]]), 1), np.array([[3]], np.float32)),
    "ops.operations of a list": lambda: (P.AddN()([t([[1, 2]]), t([[3, 4]])]), np.array([[4, 6]], np.float32)),
    "ops.operations with a bias": lambda: (P.BiasAdd("NCHW")(t([[1, 2]]), t([1, 1])), np.array([[2, 3]], np.float32)),
    "ops.GradOperation": lambda: (ops.GradOperation()(square)(t([3.0])), [6.0]),
    "ops.GradOperation from sens": lambda: (
        ops.GradOperation(get_all=True, sens_param=True)(square)(t([3.0]), t([2.0])), ([12.0],),
    ),
    "ops.HyperMap": hyper,
    "ops.cast": lambda: (ops.cast(t([1.5]), ms.float16).dtype, torch.float16),
    "ops.conv2d": lambda: (
        ops.conv2d(X, ops.ones_like(X[:, :, :3, :3]), t([1.0]), 2, "same"), np.array([[[[46, 40], [67, 51]]]], np.float32),
    ),
    "ops.depend": lambda: (ops.depend(t([1.0]), None), [1.0]),
    "ops.flatten": lambda: (ops.flatten(X).shape, (1, 16)),
    "ops.log_softmax": lambda: (ops.log_softmax(LOGITS), np.array([[-1.3132617, -0.3132617]], np.float32)),
    "ops.mixed_precision_cast": lambda: (
        [x.dtype for x in (lambda d: [d["x"], *d["more"]])(ops.mixed_precision_cast(ms.float16, {"x": t([1.5]), "more": (t([2.5]), torch.ones(1, dtype=torch.int32))}))],
        [torch.float16, torch.float16, torch.int32],
    ),
    "ops.matmul": lambda: (ops.matmul(t([[1, 2]]), t([[3], [4]])), np.array([[11]], np.float32)),
    "ops.max_pool2d": lambda: (ops.max_pool2d(X, 2), np.array([[[[5, 7], [13, 15]]]], np.float32)),
    "ops.mean": lambda: (ops.mean(t([[1, 2], [3, 4]]), 0, True), np.array([[2, 3]], np.float32)),
    "ops.mean of all": lambda: (ops.mean(t([[1, 2], [3, 4]]), (0, 1)), 2.5),
    "ops.one_hot": lambda: (ops.one_hot(t([1, 0], ms.int32), 3), np.array([[0, 1, 0], [1, 0, 0]])),
    "ops.one_hot of tensors": lambda: (
        ops.one_hot(t([1, 0], ms.int32), 3, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32), 0),
        np.array([[0, 1], [1, 0], [0, 0]], np.float32),
    ),
    "ops.ones_like": lambda: (ops.ones_like(t([2.0]), dtype=ms.int32), np.array([1], np.int32)),
    "ops.partial": lambda: (ops.partial(P.Add(), t([1.0]))(t([2.0])), [3.0]),
    "ops.relu": lambda: (ops.relu(t([-1.0, 2.0])), [0.0, 2.0]),
    "ops.reshape": lambda: (ops.reshape(X, (2, -1)).shape, (2, 8)),
    "ops.softmax": lambda: (ops.softmax(LOGITS, -1, dtype=ms.float16).dtype, torch.float16),
    "ops.square": lambda: (ops.square(t([3.0])), [9.0]),
    "ops.stop_gradient": lambda: (ops.stop_gradient(Parameter(t([1.0]))).requires_grad, False),
    "ops.zeros_like": lambda: (ops.zeros_like(t([2.0])), np.array([0], np.float32)),
    "value_and_grad": lambda: (ms.value_and_grad(square)(t([3.0])), ([9.0], [6.0])),
    "value_and_grad by weights": lambda: (
        (lambda w: ms.value_and_grad(lambda x: (x * w, x), None, [w], has_aux=True)(t([3.0])))(Parameter(t([2.0]))),
        (([6.0], [3.0]), ([3.0],)),
    ),
    "grad": lambda: (ms.grad(square, 0, sens_param=True)(t([3.0]), t([2.0])), [12.0]),
    # tensors
    "Tensor": lambda: (Tensor(np.array([1, 2], np.int32)), np.array([1, 2], np.int32)),
    "Tensor by name": lambda: (Tensor(input_data=[1, 2], dtype=ms.float32), np.array([1, 2], np.float32)),
    "Tensor initialised": lambda: (
        Tensor(shape=(2, 2), dtype=ms.float32, init=start.One()), np.ones((2, 2), np.float32),
    ),
    "Parameter": lambda: ((lambda p: (p, p.requires_grad))(Parameter(Tensor(49, dtype=ms.int32), name="n")), (np.int32(49), False)),
    "Parameter to train": lambda: (
        [Parameter(t([1.0]), requires_grad=wanted).requires_grad for wanted in (True, False)], [True, False],
    ),
    "dtype": lambda: ((ms.dtype.float16, ms.dtype.int32), (torch.float16, torch.int32)),
    "common.initializer": lambda: (start.initializer(start.Constant(2), 3), np.full(3, 2, np.float32)),
    **{f"common.initializer {name}": spread(name) for name in (
        "uniform", "xavier_uniform", "xavier_normal", "he_uniform", "he_normal", "TruncatedNormal", "normal",
    )},
}  # fmt: skip
