"""Misuse of the front-ends is answered in words: what was expected and what came, never a bare AttributeError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfstep.compat.apex
import halfstep.compat.megengine
import halfstep.compat.mindspore
from halfstep.errors import HalfstepError

mge: Any = halfstep.compat.megengine
ms: Any = halfstep.compat.mindspore
apex: Any = halfstep.compat.apex
X = torch.ones(2, 2)


def attached() -> Any:
    return mge.autodiff.GradManager()


def momentum() -> Any:
    return ms.nn.Momentum(ms.nn.Dense(2, 1).trainable_params(), 0.1, 0.9)


def model() -> Any:
    net = ms.nn.Dense(2, 1)
    return ms.train.Model(net, ms.nn.MSELoss(), ms.nn.Momentum(net.trainable_params(), 0.1, 0.9))


def prepared() -> Any:
    net = torch.nn.Linear(2, 2)
    return apex.amp.initialize(net, torch.optim.SGD(net.parameters(), 0.1), opt_level="O2", verbosity=0)[1]


OURS: dict[str, tuple[Callable[[], Any], str]] = {
    "backward without a manager": (lambda: mge.amp.GradScaler().backward(None, X.sum()), "expected the GradManager"),
    "backward from text": (lambda: mge.amp.GradScaler().backward(attached(), "loss"), "expected the loss as a tensor"),
    "unscale nothing": (lambda: mge.amp.GradScaler().unscale(None), r"gm\.attached_tensors\(\)"),
    "unscale numbers": (lambda: mge.amp.GradScaler().unscale([3]), r"gm\.attached_tensors\(\)"),
    "load nothing": (lambda: mge.amp.GradScaler().load_state_dict(None), "expected what state_dict"),
    "attach nothing": (lambda: attached().attach(None), "expected a tensor or several"),
    "attach with a number": (lambda: attached().attach(X.clone(), callbacks=3), "expected a function or several"),
    "group with a number": (lambda: attached() | 3, "expected another GradManager"),
    "convert a number": (lambda: mge.amp.convert_tensor_format(3), "expected a tensor"),
    "convert a tensor as a module": (lambda: mge.amp.convert_module_format(X), "expected a torch module"),
    "clip the wrong way round": (lambda: mge.optimizer.clip_grad_value([X], 2, 1), "above upper"),
    "tensor of an object": (lambda: mge.tensor(object()), "expected a number, nested lists"),
    "a repository that is a number": (lambda: mge.hub.load(3, "resnet18"), "only 'megengine/models'"),
    "a word hub.list does not know": (lambda: mge.hub.list("megengine/models", nonsense=1), "no argument nonsense"),
    "a word the model does not know": (lambda: mge.hub.load("megengine/models", "resnet18", nonsense=1), "num_classes"),
    "another convolution": (lambda: mge.functional.conv2d(X, X, conv_mode="convolution"), "'cross_correlation'"),
    "another sum": (lambda: mge.functional.matmul(X, X, compute_mode="float16"), "'default' or 'float32'"),
    "no bounds": (lambda: mge.functional.clip(X), "neither lower nor upper"),
    "unequal parts": (lambda: mge.functional.split(X, 3), "not 3 equal parts"),
    "squeeze a long axis": (lambda: mge.functional.squeeze(X, 0), "has 2 elements"),
    "both sizes": (lambda: mge.functional.interpolate(X, 3, 2.0), "was given both"),
    "corners of nearest": (
        lambda: mge.functional.interpolate(X, 3, mode="nearest", align_corners=True), "has no such choice",
    ),
    "an affine norm without weights": (lambda: mge.functional.layer_norm(X, 2, True), "pass weight and bias"),
    "train on a number": (lambda: model().train(1, 3), "expected batches"),
    "evaluate a number": (lambda: model().eval(3), "expected batches"),
    "sink mode": (lambda: model().train(1, [], dataset_sink_mode=True), "leave both out"),
    "a callback that is text": (lambda: model().train(1, [], callbacks="loss"), "functions of a Progress"),
    "epochs before the first": (lambda: model().train(2, [], initial_epoch=2), "below epoch=2"),
    "another backend": (lambda: model().predict(X, backend="lite"), "torch runs the network"),
    "no parameters": (lambda: ms.nn.Momentum(None, 0.1, 0.9), "expected parameters or groups"),
    "an empty list of parameters": (lambda: ms.nn.SGD([]), r"net\.trainable_params\(\)"),
    "centralised gradients": (
        lambda: ms.nn.SGD([{"params": [X], "grad_centralization": True}]), "does not exist here",
    ),
    "gradients that are numbers": (lambda: momentum()((1.0, 2.0)), "expected tensors, one for each"),
    "a scale that is text": (lambda: ms.nn.DynamicLossScaleUpdateCell(8.0, 2, 2)("x", True), "expected the tensor"),
    "a counter beyond the window": (
        lambda: setattr(ms.amp.DynamicLossScaler(8.0, 2, 4), "counter", 4), "below scale_window=4",
    ),
    "cells that are numbers": (lambda: ms.nn.SequentialCell(3), "expected cells or torch modules"),
    "a momentum that is text": (lambda: ms.nn.BatchNorm2d(2, momentum="a"), "expected the share of the old"),
    "channels last": (lambda: ms.nn.Conv2d(1, 1, 3, data_format="NHWC"), "format='NHWC'; expected 'NCHW': transpose"),
    "an axis for a flag": (lambda: ms.nn.Embedding(4, 2, 1), "padding_idx= is an argument by name"),
    "a decay for a flag": (lambda: ms.nn.Adam([X], 0.1, 0.9, 0.9, 1e-8, 0.01), "weight_decay= comes after"),
    "Nesterov's Adam": (lambda: ms.nn.Adam([X], use_nesterov=True), "NAdam"),
    "an unknown start": (lambda: ms.nn.Dense(2, 2, "xavier_unifrom"), "did you mean 'xavier_uniform'"),
    "no data": (lambda: ms.Tensor(), "neither input_data nor init"),
    "a dtype that is text": (lambda: ms.ops.cast(X, "float16"), r"mstype\.float16"),
    "a loss that is a number": (lambda: ms.value_and_grad(lambda a: 3)(X), "return the loss as a tensor"),
    "a map of nothing": (lambda: ms.ops.HyperMap()(), "takes the function first"),
    "gradients by number": (lambda: ms.grad(lambda a: a, return_ids=True), "gradients come in order"),
}  # fmt: skip
"""With halfstep's errors."""

APEXS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "load nothing": (lambda: (prepared(), apex.amp.load_state_dict(None)), TypeError, r"amp\.state_dict\(\)"),
    "load a number": (
        lambda: (prepared(), apex.amp.load_state_dict({"loss_scaler0": 3})), RuntimeError, "loss_scale' and 'unskipped",
    ),
    "load another key": (
        lambda: (prepared(), apex.amp.load_state_dict({"loss_scalerX": {}})), RuntimeError, "unexpected key",
    ),
    "masters of nothing": (lambda: list(apex.amp.master_params(None)), TypeError, "takes an optimizer"),
    "a loss_id that is text": (
        lambda: apex.amp.scale_loss(X.sum(), prepared(), loss_id="0").__enter__(), TypeError, "below num_losses",
    ),
    "a ceiling that is text": (
        lambda: apex.amp.initialize(torch.nn.Linear(2, 2), max_loss_scale="x"), ValueError, "max_loss_scale='x'",
    ),
    "decorate a number": (lambda: apex.amp.half_function(3), TypeError, "take a function"),
    "LARC of nothing": (lambda: apex.parallel.LARC(None), TypeError, "wraps an optimizer"),
    "SGD of nothing": (lambda: apex.optimizers.FusedSGD(None, 0.1), TypeError, r"model\.parameters\(\)"),
    "SGD without a rate": (lambda: apex.optimizers.FusedSGD([X.clone()]), ValueError, "no lr"),
    "SGD with a rate for one group": (
        lambda: apex.optimizers.FusedSGD([{"params": [X.clone()], "lr": 1.0}]).add_param_group({"params": [X.clone()]}),
        ValueError, "required optimization parameter lr",
    ),
    "a kernel that is not here": (
        lambda: apex.multi_tensor_apply.multi_tensor_applier(None, None, []), RuntimeError, "torch._foreach_",
    ),
    "a mixed norm without weights": (
        lambda: apex.normalization.MixedFusedLayerNorm(2, elementwise_affine=False), RuntimeError, "use FusedLayerNorm",
    ),
}  # fmt: skip
"""With the classes that Apex raises."""


@pytest.mark.parametrize("what", OURS)
def test_misuse_of_megengine_and_mindspore_is_explained(what: str) -> None:
    call, words = OURS[what]
    with pytest.raises(HalfstepError, match=words):
        call()


@pytest.mark.parametrize("what", APEXS)
def test_misuse_of_apex_is_explained(what: str) -> None:
    call, kind, words = APEXS[what]
    with pytest.raises(kind, match=words):
        call()


def test_parts_of_apex_that_are_not_here_are_named_with_what_to_use() -> None:
    apex.install(force=True)
    try:
        with pytest.raises(ModuleNotFoundError, match=r"apex\.contrib.*torch has fused attention"):
            __import__("apex.contrib.xentropy")
        with pytest.raises(ModuleNotFoundError, match=r"torch\.nn\.Sequential"):
            __import__("apex.mlp")
    finally:
        apex.uninstall()
    with pytest.raises(ModuleNotFoundError, match="No module named 'apex'"):
        __import__("apex.mlp")
