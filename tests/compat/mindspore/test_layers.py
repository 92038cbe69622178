"""Layers, primitives and constructors: MindSpore's arguments on torch's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore.ops import operations as P  # MindSpore's own abbreviation
from tests.compat.mindspore.nets import untyped


def test_a_tensor_is_a_torch_tensor_with_a_copy_of_the_data() -> None:
    array = np.ones((2, 3), np.float32)
    made = ms.Tensor(array)
    array[:] = 5
    assert type(made) is Tensor and isinstance(made, ms.Tensor) and made.dtype is torch.float32 and made.max() == 1
    assert ms.Tensor(np.zeros(1)).dtype is torch.float64 and ms.Tensor([1.0]).dtype is torch.float32
    assert ms.Tensor(np.full((1), 1.0), dtype=ms.common.dtype.float32).dtype is torch.float32
    assert ms.Tensor(made, ms.float16).dtype is torch.float16 and ms.Tensor(3).dtype is torch.int64
    with pytest.raises(TypeError, match="dtype='float32' is a str; expected one of mindspore.dtype"):
        ms.Tensor([1.0], "float32")  # type: ignore[arg-type]


def test_a_parameter_is_a_torch_parameter() -> None:
    made = ms.Parameter(ms.Tensor([1.0]), name="w", requires_grad=False)
    assert type(made) is nn.Parameter and isinstance(made, ms.Parameter) and not made.requires_grad
    with pytest.raises(TypeError, match="name=3"):
        ms.Parameter([1.0], 3)  # type: ignore[arg-type]


def test_a_cell_is_a_torch_module_that_starts_in_evaluation_mode() -> None:
    net = ms.nn.SequentialCell([ms.nn.Dense(4, 3), ms.nn.ReLU(), nn.Dropout(0.5)])
    assert isinstance(net, nn.Module) and isinstance(net[0], nn.Linear) and not net.training
    assert net.set_train() is net and net[2].training and not net.set_train(False).training
    assert len(net.trainable_params()) == 2 and net.untrainable_params() == []
    assert list(net.parameters_dict()) == ["0.weight", "0.bias"] == [n for n, _ in net.parameters_and_names()]
    assert len(net.cells()) == 3 and set(net.name_cells()) == {"0", "1", "2"}
    assert [n for n, _ in net.cells_and_names()] == ["", "0", "1", "2"]
    assert len(list(net.get_parameters())) == 2 and net.set_grad(False).trainable_params() == []
    with pytest.raises(NotImplementedError, match="Cell has no construct"):
        ms.nn.Cell()(1)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_same_padding_gives_one_output_for_each_stride_and_pads_more_at_the_end(
    dims: int, stride: int, kernel: int
) -> None:
    kind = [ms.nn.Conv1d, ms.nn.Conv2d, ms.nn.Conv3d][dims - 1]
    size = 7 if dims < 3 else 5
    layer = kind(2, 3, kernel, stride)
    x = torch.randn(1, 2, *[size] * dims)
    y = layer(x)
    assert y.shape == (1, 3, *[-(-size // stride)] * dims)
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    padded = F.pad(x, [total // 2, total - total // 2] * dims)
    plain = [F.conv1d, F.conv2d, F.conv3d][dims - 1](padded, layer.weight, None, stride)
    assert torch.equal(y, plain)


def test_valid_and_pad_modes_are_torchs() -> None:
    x = torch.randn(2, 2, 9, 9)
    valid = ms.nn.Conv2d(2, 4, 3, 2, "valid", has_bias=True, group=2)
    assert torch.equal(valid(x), F.conv2d(x, valid.weight, valid.bias, 2, groups=2))
    padded = ms.nn.Conv2d(2, 4, 3, pad_mode="pad", padding=2, dilation=2)
    assert torch.equal(padded(x), F.conv2d(x, padded.weight, None, padding=2, dilation=2))
    sides = ms.nn.Conv2d(2, 4, 3, pad_mode="pad", padding=(1, 0, 2, 1))
    assert torch.equal(sides(x), F.conv2d(F.pad(x, [2, 1, 1, 0]), sides.weight))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("pad_mode", ["same", "valid", "pad"])
def test_a_transposed_convolution_is_the_gradient_of_the_convolution(
    dims: int, stride: int, kernel: int, pad_mode: str
) -> None:
    forward = [ms.nn.Conv1d, ms.nn.Conv2d, ms.nn.Conv3d][dims - 1]
    back = [ms.nn.Conv1dTranspose, ms.nn.Conv2dTranspose, ms.nn.Conv3dTranspose][dims - 1]
    padding = 1 if pad_mode == "pad" else 0
    layer: Any = back(3, 2, kernel, stride, pad_mode, padding, has_bias=True, bias_init=0.5)
    y = torch.randn(1, 3, *[4] * dims)
    out = layer(y)
    assert out.shape[-1] == (4 * stride if pad_mode == "same" else 3 * stride + kernel - 2 * padding)
    conv: Any = forward(2, 3, kernel, stride, pad_mode, padding, weight_init=layer.weight.detach())
    x = torch.zeros_like(out, requires_grad=True)
    conv(x).backward(y)
    assert x.grad is not None and torch.allclose(out - 0.5, x.grad, atol=1e-5)


def test_primitives_compute_what_their_names_say() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(P.MatMul()(a, b), a @ b)
    assert torch.equal(P.MatMul(True, True)(a, b[:, :3]), a.mT @ b[:, :3].mT)
    c = torch.randn(2, 3, 4)
    assert torch.equal(P.BatchMatMul(transpose_b=True)(c, c), c @ c.mT)
    x, w = torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3)
    conv = P.Conv2D(4, 3, pad_mode="same", stride=2)
    y = conv(x, w)
    leaf = x.clone().requires_grad_()
    conv(leaf, w).backward(torch.ones_like(y))
    gradient: Any = leaf.grad
    for kind in (P.Conv2DTranspose, P.Conv2DBackpropInput):
        assert torch.allclose(
            kind(4, 3, pad_mode="same", stride=2)(torch.ones_like(y), w, x.shape), gradient, atol=1e-5
        )
    x3, w3 = torch.randn(1, 2, 5, 5, 5), torch.randn(3, 2, 2, 2, 2)
    assert torch.equal(P.Conv3D(3, 2)(x3, w3), F.conv3d(x3, w3))
    z = torch.randn(1, 3, 3, 3, 3)
    assert torch.allclose(P.Conv3DTranspose(3, 2, 2, stride=2)(z, w3), F.conv_transpose3d(z, w3, stride=2), atol=1e-6)
    assert torch.equal(P.PReLU()(a, torch.tensor([0.1])), F.prelu(a, torch.tensor([0.1])))
    assert torch.equal(P.ReLU()(a), a.relu()) and torch.equal(P.Ger()(a[0], a[1]), torch.outer(a[0], a[1]))
    assert P.Flatten()(x).shape == (2, 147) and P.Reshape()(a, (4, 3)).shape == (4, 3)
    assert torch.equal(P.MaxPool(2, 2)(x), F.max_pool2d(x, 2)) and P.MaxPool(2, 2, "SAME")(x).shape[-1] == 4
    assert torch.equal(P.Softmax()(a), a.softmax(-1)) and P.Cast()(a, ms.float16).dtype is torch.float16
    assert torch.equal(P.ReduceMean()(a), a.mean()) and P.ReduceMean(True)(a, 1).shape == (3, 1)
    assert torch.equal(P.ReduceSum()(a, (0,)), a.sum(0)) and torch.equal(P.Exp()(a), a.exp())
    assert torch.equal(P.Add()(a, 1), a + 1) and torch.equal(P.Sub()(a, a), a - a) and torch.equal(P.Mul()(a, a), a * a)
    assert torch.equal(P.BiasAdd()(x, torch.arange(3.0)), x + torch.arange(3.0)[:, None, None])
    assert torch.equal(P.Log()(a.abs()), a.abs().log()) and "transpose_a=False" in repr(P.MatMul())
    with pytest.raises(ValueError, match="takes matrices"):
        P.MatMul()(c, c)
    with pytest.raises(NotImplementedError, match="defines no __call__"):
        P.Primitive()()


def test_functions_of_ops() -> None:
    a = torch.randn(3, 4)
    assert ms.ops.cast(1.5, ms.float16).dtype is torch.float16 and ms.ops.flatten(torch.ones(2, 3, 4)).shape == (2, 12)
    assert torch.equal(ms.ops.softmax(a), a.softmax(-1)) and torch.equal(ms.ops.log_softmax(a, 0), a.log_softmax(0))
    assert torch.equal(ms.ops.one_hot(torch.tensor([1, 0]), 2), torch.eye(2).flip(0))
    assert ms.ops.stop_gradient(a.requires_grad_()).requires_grad is False and ms.ops.reshape(a, (4, 3)).shape == (4, 3)
    with pytest.raises(ValueError, match="order='F'"):
        ms.ops.flatten(a, "F")


def test_gradients_as_values() -> None:
    layer = nn.Linear(3, 1)
    x = torch.randn(5, 3)
    loss, (of_x, of_w) = ms.value_and_grad(lambda x: layer(x).mean(), 0, list(layer.parameters()))(x)
    assert torch.allclose(of_x, layer.weight.expand(5, 3) / 5) and torch.allclose(of_w[0], x.mean(0, keepdim=True))
    assert not loss.requires_grad and layer.weight.grad is None and not x.requires_grad
    both = ms.grad(lambda a, b: (a * b).sum(), (0, 1))(torch.tensor(2.0), torch.tensor(3.0))
    assert [float(g) for g in both] == [3.0, 2.0]
    gradient, (aux,) = ms.grad(lambda a: (a * a, a + 1), 0, has_aux=True)(torch.tensor(2.0))
    assert float(gradient) == 4.0 and float(aux) == 3.0
    unused = nn.Parameter(torch.ones(2))
    assert torch.equal(ms.grad(lambda a: a, None, unused)(torch.tensor(1.0, requires_grad=True)), torch.zeros(2))
    seeded = ms.ops.GradOperation(get_all=True, sens_param=True)(lambda a, b: a * b)
    assert [float(g) for g in seeded(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(10.0))] == [30.0, 20.0]
    assert ms.ops.HyperMap()(lambda a, b: a + b, (1, (2, 3)), (4, (5, 6))) == (5, (7, 9))
    for call, error in (
        (lambda: untyped.value_and_grad(3), TypeError),
        (lambda: untyped.value_and_grad(len, None), ValueError),
        (lambda: untyped.ops.GradOperation(get_by_list=True)(len), ValueError),
    ):
        with pytest.raises(error):
            call()  # type: ignore[no-untyped-call]  # lambdas have no types


def test_pooling_has_stride_one_unless_told() -> None:
    x = torch.randn(1, 1, 6, 6)
    assert torch.equal(ms.nn.MaxPool2d(2)(x), F.max_pool2d(x, 2, 1))
    assert torch.equal(ms.nn.MaxPool2d(2, 2)(x), F.max_pool2d(x, 2))
    assert torch.equal(ms.nn.MaxPool2d(3, 2, "pad", 1)(-x.abs()), F.max_pool2d(-x.abs(), 3, 2, 1))
    assert ms.nn.MaxPool2d(5, 4, "same")(x).shape[-1] == 2
    assert torch.equal(ms.nn.AvgPool2d(2, 2)(x), F.avg_pool2d(x, 2))
    for counted in (True, False):
        pool = ms.nn.AvgPool2d(3, 2, "pad", 1, count_include_pad=counted)
        assert torch.equal(pool(x), F.avg_pool2d(x, 3, 2, 1, count_include_pad=counted))
    assert "stride=(1, 1)" in repr(ms.nn.MaxPool2d(2))


def test_batch_norms_momentum_is_the_share_of_the_old_statistics() -> None:
    for kind, other, shape in (
        (ms.nn.BatchNorm1d, nn.BatchNorm1d, (8, 3)),
        (ms.nn.BatchNorm2d, nn.BatchNorm2d, (8, 3, 4, 4)),
        (ms.nn.BatchNorm3d, nn.BatchNorm3d, (8, 3, 2, 2, 2)),
    ):
        ours = kind(3).set_train()
        theirs: Any = other(3, momentum=0.1)
        x = torch.randn(*shape)
        assert torch.allclose(ours(x), theirs(x)) and torch.allclose(ours.moving_mean, theirs.running_mean)
        assert torch.allclose(ours.moving_variance, theirs.running_var) and ours.num_batches_tracked == 1
        assert ours.gamma is ours.weight and ours.beta is ours.bias
        ours.set_train(False), theirs.eval()
        assert torch.allclose(ours(x), theirs(x))
    fixed, always = ms.nn.BatchNorm1d(3, use_batch_statistics=False).set_train(), ms.nn.BatchNorm1d(3)
    fixed(torch.randn(8, 3))
    assert torch.equal(fixed.moving_mean, torch.zeros(3))
    always.use_batch_statistics = True
    x = 5 + torch.randn(8, 3)
    assert always(x).mean().abs() < 1e-5 and torch.allclose(always.moving_mean, 0.1 * x.mean(0))


def test_losses_are_mindspores() -> None:
    x, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 0])
    rows = F.one_hot(y, 3)
    sparse, dense = ms.nn.SoftmaxCrossEntropyWithLogits(True), ms.nn.SoftmaxCrossEntropyWithLogits()
    assert sparse(x, y.int()).shape == (4,) and torch.allclose(sparse(x, y), dense(x, rows))
    assert torch.allclose(ms.nn.CrossEntropyLoss()(x, y), sparse(x, y).mean())
    assert torch.equal(ms.nn.MSELoss("sum")(x, rows), F.mse_loss(x, rows.float(), reduction="sum"))
    assert torch.equal(ms.nn.L1Loss()(x, rows), (x - rows).abs().mean())
    bce = ms.nn.BCEWithLogitsLoss()(x, rows)
    assert torch.equal(bce, F.binary_cross_entropy_with_logits(x, rows.float()))
    base = ms.nn.LossBase("sum")
    assert float(base.get_loss(torch.ones(3), 2.0)) == 6.0 and ms.nn.LossBase("none").get_loss(x).shape == x.shape
    for call, error, text in (
        (lambda: untyped.nn.MSELoss("max"), ValueError, "reduction='max'"),
        (lambda: sparse(x, y.float()), TypeError, "sparse=False"),
        (lambda: dense(x, y), ValueError, "sparse=True for class numbers"),
        (lambda: untyped.nn.SoftmaxCrossEntropyWithLogits("yes"), TypeError, "sparse='yes'"),
    ):
        with pytest.raises(error, match=text):
            call()  # type: ignore[no-untyped-call]  # lambdas have no types


def test_the_other_layers_are_torchs() -> None:
    x = torch.randn(2, 4)
    assert torch.equal(ms.nn.Sigmoid()(x), x.sigmoid()) and torch.equal(ms.nn.Tanh()(x), x.tanh())
    assert torch.equal(ms.nn.GELU()(x), F.gelu(x, approximate="tanh")) and torch.equal(ms.nn.GELU(False)(x), F.gelu(x))
    assert torch.equal(ms.nn.Softmax()(x), x.softmax(-1)) and ms.nn.Flatten()(torch.ones(2, 3, 4)).shape == (2, 12)
    assert torch.equal(ms.nn.LayerNorm((4,))(x), F.layer_norm(x, [4], eps=1e-7))
    assert ms.nn.GroupNorm(2, 4)(torch.randn(2, 4, 3, 3)).shape == (2, 4, 3, 3)
    assert ms.nn.Embedding(10, 4)(torch.tensor([[1, 2]])).shape == (1, 2, 4)
    assert ms.nn.Dropout(p=0.25).p == ms.nn.Dropout(keep_prob=0.75).p == 0.25
    assert torch.equal(ms.nn.Dropout(p=0.5)(x), x) and ms.nn.Dropout(p=0.5).set_train()(torch.ones(999)).max() == 2.0
    relu = ms.nn.Dense(4, 2, 1.0, "zeros", activation=ms.nn.ReLU())
    assert torch.allclose(relu(x), x.sum(1, keepdim=True).expand(2, 2).relu(), atol=1e-6)
    assert ms.nn.Dense(4, 2, has_bias=False).bias is None and ms.nn.Dense(2, 2, "normal").weight.abs().max() < 0.1
    h = torch.zeros(2, 3)
    assert ms.nn.RNNCell(4, 3)(x, h).shape == ms.nn.GRUCell(4, 3)(x, h).shape == (2, 3)
    assert len(ms.nn.LSTMCell(4, 3)(x, (h, h))) == 2
    assert len(ms.nn.CellList(ms.nn.ReLU(), ms.nn.ReLU())) == 2


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: untyped.nn.Conv2d(1, 1, 3, pad_mode="full"),
            ValueError,
            "Conv2d: pad_mode='full'; expected one of 'same'",
        ),
        (
            lambda: untyped.nn.Conv2d(1, 1, 3, padding=1),
            ValueError,
            "padding=1 beside pad_mode='same'.*use pad_mode='pad'",
        ),
        (lambda: untyped.nn.Conv2d(1, 1, 3, pad_mode="pad", padding=-1), ValueError, "padding=-1"),
        (lambda: untyped.nn.Conv2d(1, 1, (3, 3, 3)), TypeError, "kernel_size=\\(3, 3, 3\\)"),
        (lambda: untyped.nn.Dense(2, 2, "he"), ValueError, "weight_init='he'"),
        (lambda: untyped.nn.Dense(2, 2, torch.ones(3)), ValueError, "a tensor of shape \\(3,\\)"),
        (lambda: untyped.nn.BatchNorm2d(3, momentum=2.0), ValueError, "momentum=2.0"),
        (lambda: untyped.nn.BatchNorm2d(3, use_batch_statistics=3), TypeError, "use_batch_statistics=3"),
        (lambda: untyped.nn.Dropout(0.5, 0.5), ValueError, "keep_prob is 1 - p"),
        (lambda: P.Conv2D(1, 3, mode=0), ValueError, "mode=0"),
        (lambda: P.Conv2DTranspose(1, 3)(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 3, 3)), ValueError, "input_size"),
        (lambda: untyped.nn.WithLossCell(3, len), TypeError, "the network is a int"),
        (lambda: untyped.nn.WithLossCell(nn.ReLU(), 3), TypeError, "loss_fn=3 is not callable"),
        (lambda: untyped.nn.WithEvalCell(nn.ReLU(), None, 1), TypeError, "add_cast_fp32=1"),
    ],
)
def test_a_wrong_setting_is_refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_gradients_that_cannot_be_are_refused_by_name() -> None:
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)

    def product(x: Tensor) -> Tensor:
        return (x * weight).sum()

    with pytest.raises(TypeError, match=r"weights\[1\] has requires_grad=False; pass .*trainable_params"):
        ms.value_and_grad(product, None, [weight, frozen])
    with pytest.raises(TypeError, match=r"weights\[0\] is 'w'; pass"):
        ms.value_and_grad(product, None, {"w": weight})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grad_position=3\): the call has 1 positional arguments; grad_position=None"):
        ms.value_and_grad(product, 3)(torch.ones(2))
    with pytest.raises(TypeError, match=r"grad_position=0\): the argument is a tensor of torch.int64, which has no"):
        ms.value_and_grad(product)(torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"has_aux=True\): the function returned a Tensor; return \(loss, more\)"):
        ms.value_and_grad(product, None, weight, has_aux=True)(torch.ones(2))


def test_an_optimizer_refuses_gradients_of_another_kind_or_shape_and_steps_nothing() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = ms.nn.Momentum([weight], 0.1, 0.9)
    with pytest.raises(TypeError, match="Momentum was called with NoneType; call it with the tuple of gradients"):
        optimizer(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Momentum was called with Tensor; call it"):
        optimizer(torch.ones(1, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gradient 0 has shape \(3,\) and its parameter \(2,\); differentiate"):
        optimizer((torch.ones(3),))
    assert torch.equal(weight, torch.ones(2)) and weight.grad is None
