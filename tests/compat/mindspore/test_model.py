"""Model: train, eval and predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfstep as hs
import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore.train.model import Progress
from tests.compat.mindspore.nets import BF16, FP16, FP32, Normed, TorchNet, formats, picture, training, untyped


def data(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of pictures whose row of light is the label."""
    rows, batches = torch.eye(4)[:3], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        labels = torch.randint(0, 3, (8,), generator=generator)
        noise = 0.1 * torch.rand(8, 1, 4, 4, generator=generator)
        batches.append((noise + rows[labels].reshape(8, 1, 4, 1), labels))
    return batches


def loss() -> Any:
    return ms.nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


@pytest.mark.filterwarnings("ignore:build_train_network:UserWarning")
@pytest.mark.parametrize("make", [Normed, TorchNet])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_a_model_trains_evaluates_and_predicts_at_every_level(make: Any, level: str) -> None:
    torch.manual_seed(0)
    net = make()
    model = ms.Model(net, loss(), training(net)[1], metrics={"accuracy"}, amp_level=level)
    before = model.eval(data())
    model.train(6, data())
    after = model.eval(data())
    assert set(after) == {"loss", "accuracy"} and after["loss"] < before["loss"]
    assert net.training  # eval puts the mode back
    assert model.predict(picture(net)).dtype is FP32


def test_a_manager_on_the_host_counts_the_steps_too_and_callbacks_see_each() -> None:
    net = Normed()
    manager = ms.amp.DynamicLossScaleManager(2.0**10, 2, 2)
    model = ms.Model(net, loss(), training(net)[1], amp_level="O2", loss_scale_manager=manager)
    seen: list[Progress] = []
    model.train(2, data(2), callbacks=seen.append)
    assert [(p.epoch, p.step) for p in seen] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert manager.get_loss_scale() == float(seen[-1].outputs[2]) == 2.0**12


def test_keep_batchnorm_fp32_reaches_build_train_network() -> None:
    net = Normed()
    model = ms.Model(net, loss(), training(net)[1], amp_level="O2", keep_batchnorm_fp32=False)
    policy = hs.prepared_policy(net)
    assert policy is not None and policy.modules == (("", "low"),) and model.predict_network is net


def test_a_model_without_loss_predicts_and_one_with_it_evaluates_without_an_optimizer() -> None:
    net = Normed()
    assert ms.Model(net).predict(picture(net)).shape == (2, 3)
    assert set(ms.Model(net, loss(), metrics={"rows": lambda out, y: len(out)}).eval(data())) == {"loss", "rows"}
    low = ms.amp.auto_mixed_precision(Normed(), "O2", ms.bfloat16)
    assert formats(low)["conv"] is BF16 and ms.Model(low).predict(picture(low)).dtype is FP32


def test_an_eval_network_of_ones_own_is_used() -> None:
    net = Normed()
    own = ms.nn.WithEvalCell(net, None)
    model = ms.Model(net, loss(), eval_network=own, metrics={"seen": lambda out, label: 1.0})
    assert model.eval(data()) == {"seen": 1.0} and model.eval_network is own


def test_an_eval_cell_returns_loss_outputs_and_label() -> None:
    net = Normed().to_float(ms.float16)
    x, y = data(1)[0]
    value, outputs, label = ms.nn.WithEvalCell(net, loss(), add_cast_fp32=True)(x, y)
    assert value.dtype is FP32 and outputs.dtype is FP32 and label is y
    assert formats(net, x)["fc"] is FP16


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda net: untyped.Model(3), TypeError, "network is a int"),
        (lambda net: untyped.Model(net, loss(), amp_level="O2"), ValueError, "without an optimizer trains nothing"),
        (lambda net: untyped.Model(net, loss(), level="O2"), ValueError, "unsupported argument level='O2'"),
        (lambda net: untyped.Model(net, metrics={"recall"}), ValueError, "metric 'recall'.*known are accuracy"),
        (lambda net: untyped.Model(net, metrics=3), TypeError, "metrics=3"),
        (lambda net: untyped.Model(net).eval([]), ValueError, "eval needs a loss_fn"),
        (lambda net: untyped.Model(net, loss()).eval([]), ValueError, "no batch"),
        (lambda net: untyped.Model(net, loss()).train(1, []), ValueError, "no optimizer was given"),
        (lambda net: untyped.Model(net, loss(), training(net)[1]).train(1, []), ValueError, "epoch 1 had no batch"),
        (lambda net: untyped.Model(net, loss(), training(net)[1]).train(0, data()), ValueError, "epoch=0"),
        (lambda net: untyped.Model(net, loss(), training(net)[1]).train(1.0, data()), TypeError, "epoch=1.0"),
        (
            lambda net: untyped.Model(net, loss(), training(net)[1]).train(2, iter(data())),
            ValueError,
            "epoch 2 had no ba",
        ),
    ],
)
def test_a_wrong_use_is_refused(call: Callable[[Any], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(Normed())


class OwnIterator:
    """Data that is its own iterator, as MindSpore's datasets in its tests."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.at == 2:
            raise StopIteration
        self.at += 1
        return torch.ones(2, 2), torch.zeros(2, 2)

    def reset(self) -> None:
        self.at = 0


def test_data_with_reset_begins_again_in_every_epoch() -> None:
    net, steps = ms.nn.Dense(2, 2), []
    model = ms.Model(net, ms.nn.MSELoss(), ms.nn.Momentum(net.trainable_params(), 0.1, 0.9))
    data = OwnIterator()
    model.train(3, data, callbacks=lambda progress: steps.append(progress.step))
    assert steps == [1, 2, 3, 4, 5, 6] and data.at == 0
    assert model.eval(data)["loss"] >= 0 and data.at == 0
