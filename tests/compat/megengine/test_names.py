"""The rest of megengine's names: tensors, optimizers, functional, hub, conversion of formats."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as T
from torch import nn

import halfstep.compat.megengine as mge
import halfstep.compat.megengine.functional as F
from halfstep.compat.megengine import amp, hub, optimizer
from halfstep.errors import RegionError, StepError

X = torch.rand(2, 4, 6, 6)


@pytest.mark.parametrize(
    "name",
    [
        "amp", "amp.autocast", "amp.convert_format", "amp.grad_scaler", "autodiff", "autodiff.grad_manager",
        "functional", "functional.elemwise", "functional.loss", "functional.math", "functional.metric", "functional.nn",
        "functional.tensor", "hub", "optimizer", "optimizer.optimizer", "tensor",
    ],
)  # fmt: skip
def test_the_originals_submodules_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"halfstep.compat.megengine.{name}")
    assert module.__name__.startswith("halfstep.compat.megengine")


# ---------------------------------------------------------------------- tensors


def test_tensors_have_megengines_defaults() -> None:
    assert mge.tensor(np.zeros(2)).dtype is mge.tensor([1.0]).dtype is torch.float32
    assert mge.tensor(np.zeros(2, dtype=np.int64)).dtype is mge.tensor([1]).dtype is torch.int32
    assert mge.tensor(np.zeros(1), dtype="int32").dtype is torch.int32
    assert mge.tensor([1.0], dtype=np.float16).dtype is torch.float16
    assert mge.tensor(16.0).shape == ()
    source = np.zeros(3, dtype=np.float32)
    copied = mge.tensor(source)
    source[0] = 1
    assert copied.tolist() == [0.0] * 3
    assert mge.tensor(X, format="nhwc").is_contiguous(memory_format=torch.channels_last)


def test_a_tensor_that_cannot_be_is_explained() -> None:
    with pytest.raises(RegionError, match="did you mean 'float32'"):
        mge.tensor(1, dtype="flaot32")
    with pytest.raises(RegionError, match="'nhwc'"):
        mge.tensor(1, format="chwn")
    with pytest.raises(RegionError, match="'xpux'"):
        mge.tensor(1, device="tpu0")


def test_devices_have_megengines_names() -> None:
    mge.set_default_device()
    assert mge.get_default_device() == "xpux"
    mge.set_default_device("cpu0")
    assert mge.get_default_device() == "cpu0" and mge.tensor(1).device.type == "cpu"
    with pytest.raises(RegionError, match="device='nothing'"):
        mge.set_default_device("nothing")
    mge.set_default_device()
    assert mge.get_default_device() == "xpux"
    from halfstep.compat.megengine.tensor import device_of

    assert device_of("gpu1") == device_of("cuda:1") == torch.device("cuda", 1)
    assert device_of("gpux") == torch.device("cuda") and device_of(torch.device("cpu")) == device_of("cpux")


# ---------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("ours", "theirs", "numbers"),
    [
        (optimizer.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (optimizer.Adam, torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.01}),
        (optimizer.AdamW, torch.optim.AdamW, {"lr": 0.1}),
        (optimizer.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    ],
)
def test_optimizers_are_torchs_and_can_be_chained(ours: Any, theirs: Any, numbers: dict[str, Any]) -> None:
    ends = []
    for make in (ours, theirs):
        weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))
        opt = make([weight, unused], **numbers)
        for step in range(3):
            weight.grad = torch.arange(3.0) - step
            if make is ours:
                assert opt.step() is opt and opt.clear_grad() is opt
                assert weight.grad is None
            else:
                opt.step()
        assert unused.tolist() == [1.0]
        ends.append(weight)
    assert torch.equal(*ends)


def test_an_optimizers_closure_is_evaluated() -> None:
    weight = nn.Parameter(torch.ones(1))
    opt, calls = optimizer.SGD([weight], 0.5), []

    def closure() -> float:
        calls.append(1)
        weight.grad = torch.ones(1)
        return 0.0

    assert opt.step(closure) is opt and calls == [1] and weight.tolist() == [0.5]


def test_gradients_are_clipped_between_unscale_and_step() -> None:
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert optimizer.clip_grad_norm([a, b, c], 1.0).item() == 5.0
    assert a.grad.item() == pytest.approx(0.6) and c.grad is None
    optimizer.clip_grad_value([a, b, c], -0.5, 0.5)
    assert a.grad.item() == b.grad.item() == 0.5


# ---------------------------------------------------------------------- functional

SAME: dict[str, tuple[Any, Any]] = {
    "add numbers": (F.add(1, 2), torch.tensor(3)),
    "sub from a number": (F.sub(1, X), 1 - X),
    "pow": (F.pow(2.0, X), 2.0**X),
    "mod": (F.mod(X, 0.3), X % 0.3),
    "greater": (F.greater(X, 0.5), X > 0.5),
    "left_shift": (F.left_shift(torch.tensor([1, 2]), 2), torch.tensor([4, 8])),
    "clip": (F.clip(X, 0.2, 0.4), X.clamp(0.2, 0.4)),
    "mean": (F.mean(X, [1, 2], keepdims=True), X.mean((1, 2), keepdim=True)),
    "mean of integers": (F.mean(torch.tensor([1, 2])), torch.tensor(1.5)),
    "var": (F.var(X, 1), X.var(1, correction=0)),
    "std": (F.std(X), X.std(correction=0)),
    "prod": (F.prod(X, 1), X.prod(1)),
    "max": (F.max(X, (1, 2)), X.amax((1, 2))),
    "min": (F.min(X), X.min()),
    "norm": (F.norm(X, 1, 2, keepdims=True), X.abs().sum(2, keepdim=True)),
    "normalize all": (F.normalize(X), X / X.norm()),
    "argmax": (F.argmax(X, 1), X.argmax(1)),
    "argmin": (F.argmin(X, 1, keepdims=True), X.argmin(1, keepdim=True)),
    "argsort": (F.argsort(X, descending=True), X.argsort(descending=True)),
    "sort": (F.sort(X)[0], X.sort().values),
    "topk": (F.topk(X, 2, descending=False)[0], X.sort().values[..., :2]),
    "topk descending": (F.topk(X, 2, descending=True, kth_only=True)[0], X.sort().values[..., -2]),
    "cumsum": (F.cumsum(X, 1), X.cumsum(1)),
    "matmul": (F.matmul(X, X, transpose_a=True), X.mT @ X),
    "dot": (F.dot(X[0, 0, 0], X[0, 0, 1]), X[0, 0, 0] @ X[0, 0, 1]),
    "matinv": (F.matinv(torch.eye(3) * 2), torch.eye(3) / 2),
    "full": (F.full((2, 3), 7), torch.full((2, 3), 7, dtype=torch.int32)),
    "zeros": (F.zeros(3), torch.zeros(3)),
    "ones": (F.ones([2], dtype="int32"), torch.ones(2, dtype=torch.int32)),
    "full_like": (F.full_like(X, 2), torch.full_like(X, 2)),
    "zeros_like": (F.zeros_like(X), torch.zeros_like(X)),
    "ones_like": (F.ones_like(X), torch.ones_like(X)),
    "eye": (F.eye(2, 3), torch.eye(2, 3)),
    "arange": (F.arange(3), torch.arange(3.0)),
    "arange from": (F.arange(1, 7, 2, dtype="int32"), torch.tensor([1, 3, 5], dtype=torch.int32)),
    "linspace": (F.linspace(0, 1, 3), torch.tensor([0, 0.5, 1])),
    "split": (F.split(X, 2, 1)[1], X[:, 2:]),
    "split at": (F.split(X, [1, 3], 1)[1], X[:, 1:3]),
    "reshape": (F.reshape(X, (2, -1)), X.reshape(2, -1)),
    "transpose": (F.transpose(X, (0, 2, 3, 1)), X.permute(0, 2, 3, 1)),
    "swapaxes": (F.swapaxes(X, 0, 1), X.transpose(0, 1)),
    "expand_dims": (F.expand_dims(X, 0), X[None]),
    "squeeze": (F.squeeze(X[:1], 0), X[0]),
    "squeeze all": (F.squeeze(X[:1, :1]), X[0, 0]),
    "broadcast_to": (F.broadcast_to(X[:1], (2, 4, 6, 6)), X[:1].expand(2, 4, 6, 6)),
    "repeat": (F.repeat(X, 2, 0), X.repeat_interleave(2, 0)),
    "tile": (F.tile(X, (1, 1, 1, 2)), torch.cat([X, X], -1)),
    "roll": (F.roll(X, 1, 0), X.roll(1, 0)),
    "gather": (F.gather(X[0, 0], 1, torch.zeros(6, 1, dtype=torch.int32)), X[0, 0, :, :1]),
    "copy": (F.copy(X), X),
    "copy to": (F.copy(X, "cpu0"), X),
    "conv_transpose2d": (
        F.nn.conv_transpose2d(X, torch.ones(4, 1, 2, 2), None, 2, 0, 0, 1, 4),
        T.conv_transpose2d(X, torch.ones(4, 1, 2, 2), None, 2, 0, 0, 4, 1),
    ),
    "avg_pool2d": (F.nn.avg_pool2d(X, 3, 2, 1), T.avg_pool2d(X, 3, 2, 1, count_include_pad=False)),
    "avg_pool2d counting": (F.nn.avg_pool2d(X, 3, 2, 1, "average"), T.avg_pool2d(X, 3, 2, 1)),
    "softmax": (F.nn.softmax(X), T.softmax(X, 1)),
    "leaky_relu": (F.nn.leaky_relu(X - 0.5), T.leaky_relu(X - 0.5)),
    "embedding": (F.nn.embedding(torch.tensor([1, 0], dtype=torch.int32), X[0, 0]), X[0, 0, [1, 0]]),
    "one_hot": (F.nn.one_hot(torch.tensor([1], dtype=torch.int32), 3), torch.tensor([[0, 1, 0]], dtype=torch.int32)),
    "pad": (F.nn.pad(X, ((0, 0), (1, 0), (0, 0), (0, 2)), constant_value=3.0), T.pad(X, (0, 2, 0, 0, 1, 0), value=3.0)),
    "pad edges": (F.nn.pad(X, ((0, 0), (0, 0), (1, 0), (0, 2)), "edge"), T.pad(X, (0, 2, 1, 0), "replicate")),
    "layer_norm": (F.nn.layer_norm(X, (6, 6), False, torch.ones(6, 6)), T.layer_norm(X, (6, 6))),
    "group_norm": (F.nn.group_norm(X, 2, True, torch.ones(4), torch.zeros(4)), T.group_norm(X, 2)),
    "interpolate": (F.nn.interpolate(X, 3, mode="nearest"), T.interpolate(X, 3, mode="nearest")),
    "cross_entropy by axis": (
        F.nn.cross_entropy(X[:, :, 0], torch.ones(2, 4, dtype=torch.int32), axis=2),
        T.cross_entropy(X[:, :, 0].mT, torch.ones(2, 4, dtype=torch.long)),
    ),
    "cross_entropy of probabilities": (
        F.nn.cross_entropy(X[0, 0].softmax(1), torch.arange(6), with_logits=False, label_smooth=0.1),
        T.cross_entropy(X[0, 0], torch.arange(6), label_smoothing=0.1),
    ),
    "cross_entropy smoothed": (
        F.nn.cross_entropy(X[0, 0], torch.arange(6), label_smooth=0.1, reduction="none"),
        T.cross_entropy(X[0, 0], torch.arange(6), label_smoothing=0.1, reduction="none"),
    ),
    "hinge_loss": (F.nn.hinge_loss(torch.tensor([[0.5, 2.0]]), torch.tensor([[-1.0, 1.0]])), torch.tensor(1.5)),
    "hinge_loss squared": (
        F.nn.hinge_loss(torch.tensor([[0.5, 2.0]]), torch.tensor([[-1.0, 1.0]]), "L2", "sum"),
        torch.tensor(2.25),
    ),
    "binary_cross_entropy": (
        F.nn.binary_cross_entropy(X, X > 0.5, with_logits=False),
        T.binary_cross_entropy(X, (X > 0.5).float()),
    ),
    "topk_accuracy": (F.topk_accuracy(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]), 2), torch.tensor(1.0)),
}


@pytest.mark.parametrize("name", SAME)
def test_functions_give_what_torch_gives(name: str) -> None:
    torch.testing.assert_close(*SAME[name])


def test_statistics_keep_their_share_by_megengines_momentum() -> None:
    mean, variance = torch.zeros(1, 4, 1, 1), torch.ones(1, 4, 1, 1)
    out = F.nn.batch_norm(X, mean, variance, training=True, momentum=0.9)
    torch.testing.assert_close(out, T.batch_norm(X, None, None, training=True))
    torch.testing.assert_close(mean.flatten(), 0.1 * X.mean((0, 2, 3)))
    assert F.topk_accuracy(X[0, 0], torch.zeros(6), (1, 6))[1] == 1.0


def test_a_response_norm_sums_its_neighbours() -> None:
    x = torch.ones(1, 3, 1, 1)
    got = F.nn.local_response_norm(x, 3, 2.0, 1.0, 1.0)
    assert got.flatten().tolist() == pytest.approx([1 / 4, 1 / 5, 1 / 4])


def test_a_wrong_word_is_explained() -> None:
    with pytest.raises(StepError, match="'mean', 'sum' or 'none'"):
        F.nn.l1_loss(X, X, reduction="max")
    with pytest.raises(StepError, match="'L1' or 'L2'"):
        F.nn.hinge_loss(X, X, "L3")
    with pytest.raises(StepError, match="expected one of constant"):
        F.nn.pad(X, ((0, 0),), "wrap")


# ---------------------------------------------------------------------- hub and formats


def test_the_hub_builds_a_resnet18() -> None:
    net = hub.load("megengine/models", "resnet18", pretrained=False)
    assert sum(p.numel() for p in net.parameters()) == 11_689_512
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 1000)
    small = hub.load("megengine/models:master", "resnet18", num_classes=5, use_cache=True, width=4)
    assert small.eval()(torch.rand(2, 3, 32, 32)).shape == (2, 5)
    assert hub.list("megengine/models") == ["resnet18"]


def test_the_hub_says_what_it_has_not() -> None:
    with pytest.raises(StepError, match="did you mean 'resnet18'"):
        hub.load("megengine/models", "resnet181")
    with pytest.raises(StepError, match="nothing is downloaded; use pretrained=False"):
        hub.load("megengine/models", "resnet18", pretrained=True)
    with pytest.raises(StepError, match="only 'megengine/models' is built in"):
        hub.load("someone/else", "resnet18")


def test_conversion_puts_channels_last_and_changes_no_value() -> None:
    conv, fc = nn.Conv2d(4, 4, 3), nn.Linear(16, 2)
    net = nn.Sequential(conv, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), fc)
    before = copy.deepcopy(net)
    other = amp.convert_module_format(net, inplace=False)
    assert other is not net and conv.weight.is_contiguous()
    assert amp.convert_module_format(net) is net
    for module in (net, other):
        weights = dict(module.named_parameters())
        assert weights["0.weight"].is_contiguous(memory_format=torch.channels_last)
        assert weights["4.weight"].is_contiguous()
        torch.testing.assert_close(module(X), before(X))
    x = X.clone().requires_grad_()
    copied = amp.convert_tensor_format(x, inplace=False)
    assert copied is not x and x.is_contiguous() and torch.equal(copied, x)
    assert amp.convert_tensor_format(x) is x and x.is_leaf
    assert x.shape == X.shape and x.is_contiguous(memory_format=torch.channels_last)
    assert amp.convert_tensor_format(vector := torch.ones(3)) is vector
    volume = amp.convert_tensor_format(torch.rand(1, 2, 3, 4, 5))
    assert volume.is_contiguous(memory_format=torch.channels_last_3d)
    with amp.autocast(), mge.autodiff.GradManager().attach(net.parameters()) as gm:
        gm.backward(F.nn.cross_entropy(net(x), mge.tensor([0, 1])))
    optimizer.SGD(net.parameters(), lr=0.1).step().clear_grad()
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_signatures_are_megengines() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(amp.autocast) == ["enabled", "low_prec_dtype", "high_prec_dtype"]
    assert names(amp.GradScaler) == ["init_scale", "growth_factor", "backoff_factor", "growth_interval"]
    defaults = [p.default for p in inspect.signature(amp.GradScaler).parameters.values()]
    assert defaults == [2.0**4, 2.0, 0.5, 2000]
    assert names(amp.GradScaler.backward) == ["self", "gm", "y", "dy", "unscale_grad", "update_scale"]
    assert names(amp.GradScaler.unscale) == ["self", "grad_tensors"]
    assert names(amp.GradScaler.update) == ["self", "new_scale"]
    assert names(amp.convert_tensor_format) == ["x", "inplace"]
    assert names(amp.convert_module_format) == ["module", "inplace"]
    assert names(mge.autodiff.GradManager.attach) == ["self", "tensors", "callbacks"]
    assert names(mge.autodiff.GradManager.backward) == ["self", "y", "dy"]
    assert names(mge.optimizer.SGD) == ["params", "lr", "momentum", "nesterov", "weight_decay"]
    assert names(mge.optimizer.Adam) == ["params", "lr", "betas", "eps", "weight_decay"]
    assert names(mge.functional.nn.cross_entropy) == [
        "pred",
        "label",
        "axis",
        "with_logits",
        "label_smooth",
        "reduction",
    ]
    assert names(mge.tensor) == ["data", "dtype", "device", "is_const", "no_cache", "name", "format"]
