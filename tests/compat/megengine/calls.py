"""Calls of MegEngine's names outside of `functional`, each with the value that MegEngine gives."""

# ruff: noqa: E501 - a table, one call a line

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import halfstep.compat.megengine
from tests.compat.calls import Call

__all__ = ["CALLS"]

mge: Any = halfstep.compat.megengine
"""Without the types: calls take what MegEngine takes."""
F, amp, autodiff, hub, optimizer = mge.functional, mge.amp, mge.autodiff, mge.hub, mge.optimizer
ONES = [[1.0, 1.0], [1.0, 1.0]]


def product_format() -> Any:
    return F.matmul(mge.tensor(ONES), mge.tensor(ONES)).dtype


def in_region(**words: Any) -> Any:
    with amp.autocast(**words):
        return product_format()


def decorated() -> Any:
    return amp.autocast(low_prec_dtype="bfloat16")(product_format)()


def switched(**words: Any) -> Any:
    before = {word: getattr(amp, word) for word in words}
    for word, value in words.items():
        setattr(amp, word, value)
    try:
        return product_format(), F.exp(mge.tensor(1.0).half()).dtype
    finally:
        for word, value in before.items():
            setattr(amp, word, value)


def learned(factor: float = 2.0) -> tuple[Any, Any]:
    """Return a tensor with the gradient `factor`, and the manager that recorded it."""
    x, gm = mge.Parameter([1.0, 2.0]), autodiff.GradManager()
    gm.attach(x)
    with gm:
        gm.backward(F.sum(x * factor))
    return x, gm


def scaled(data: list[float], *, update: bool = True, **words: Any) -> tuple[Any, Any]:
    """Return the scaler and the gradient after one backward pass from ``sum(x * data)``."""
    x, gm, scaler = mge.Parameter([1.0] * len(data)), autodiff.GradManager(), amp.GradScaler(**words)
    gm.attach(x)
    with gm:
        scaler.backward(gm, F.sum(x * mge.tensor(data)), update_scale=update)
    return scaler, x.grad


def after(scaler: Any, grad: Any) -> tuple[Any, float]:
    return grad, scaler.scale_factor


def by_hand() -> tuple[Any, Any]:
    x, gm, scaler = mge.Parameter([1.0]), autodiff.GradManager(), amp.GradScaler()
    gm.attach(x)
    for _ in range(2):
        with gm:
            scaler.backward(gm, 3 * x, unscale_grad=False)
    waiting = x.grad.clone()
    assert scaler.unscale(gm.attached_tensors()) is scaler
    return (waiting, x.grad), (np.array([96.0], np.float32), np.array([6.0], np.float32))


def seeded() -> tuple[Any, Any]:
    x, gm, scaler = mge.Parameter([1.0, 1.0]), autodiff.GradManager(), amp.GradScaler(init_scale=4.0)
    gm.attach([x])
    with gm:
        scaler.backward(gm, [x * 2], dy=[mge.tensor([1.0, 10.0])])
    return x.grad, [2.0, 20.0]


def moved() -> tuple[Any, Any]:
    scaler, _ = scaled([1.0], update=False, growth_interval=1)
    scaler.update()
    grown = scaler.scale_factor
    scaler.update(new_scale=8.0)
    return (grown, scaler.scale_factor), (32.0, 8.0)


def loaded() -> tuple[Any, Any]:
    scaler, other = amp.GradScaler(8.0, 3.0, 0.25, 7), amp.GradScaler()
    state = scaler.state_dict()
    other.load_state_dict({**state, "_growth_tracker": 5})
    return (state, other.state_dict()["_growth_tracker"], other.scale_factor), (
        {"scale_factor": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 0},
        5,
        8.0,
    )


def set_and_read(name: str, value: float) -> Call:
    def call() -> tuple[Any, Any]:
        scaler = amp.GradScaler()
        setattr(scaler, name, value)
        return getattr(scaler, name), value

    return call


def nhwc_module() -> tuple[Any, Any]:
    net: Any = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    other = amp.convert_module_format(net, inplace=False)
    return [m[0].weight.is_contiguous(memory_format=torch.channels_last) for m in (net, other)], [False, True]


def nhwc_tensor() -> tuple[Any, Any]:
    x = F.reshape(F.arange(24), (1, 2, 3, 4))
    y = amp.convert_tensor_format(x)
    return (y is x, y.stride(), y), (True, (24, 1, 8, 2), np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4))


def callbacks() -> tuple[Any, Any]:
    x, gm = mge.Parameter([1.0]), autodiff.GradManager()
    gm.attach(x, callbacks=lambda tensor, grad: grad * 5).attach([x], callbacks=[lambda tensor, grad: grad + 1])
    with gm:
        gm.backward(x * 3, dy=mge.tensor([2.0]))
    return x.grad, [31.0]


def recorded() -> tuple[Any, Any]:
    x, gm = mge.Parameter([3.0]), autodiff.GradManager()
    gm.attach(x)
    gm.record()
    y = x * x
    gm.backward(y)
    gm.record()
    gm.release()
    return x.grad, [6.0]


def grouped() -> tuple[Any, Any]:
    x, y = mge.Parameter([1.0]), mge.Parameter([2.0])
    one, two = autodiff.GradManager().attach(x), autodiff.GradManager().attach(y)
    with one | two as both:
        both.backward(x * y)
    return (x.grad, y.grad, isinstance(both, autodiff.GradManagerGroup)), ([2.0], [1.0], True)


def own_backward() -> tuple[Any, Any]:
    class Straight(autodiff.Function):  # type: ignore[misc, name-defined]  # `autodiff` is untyped here
        """Round, with the derivative of the identity."""

        def forward(self, x: Any) -> Any:
            return F.round(x)

        def backward(self, dy: Any) -> Any:
            return dy

    x = mge.Parameter([1.25])
    gm = autodiff.GradManager().attach(x)
    with gm:
        y = Straight()(x * 2)
        gm.backward(y)
    return (y, x.grad), ([3.0], [2.0])


def attached() -> tuple[Any, Any]:
    gm, kept = autodiff.GradManager(), mge.Parameter([1.0])
    gm.attach([kept, mge.Parameter([2.0])])
    return [one is kept for one in gm.attached_tensors()], [True]


def stepped(make: Callable[[Any], Any], *gradients: float) -> float:
    """Return a weight that began at 1 after steps with `gradients`, cleared in between."""
    weight = mge.Parameter([1.0])
    opt = make([weight])
    for gradient in gradients:
        weight.grad = mge.tensor([gradient])
        assert opt.step().clear_grad() is opt and weight.grad is None
    return float(weight.detach())


def adam(decoupled: float, coupled: float) -> float:
    """Two steps of Adam by hand: gradients 0.5 and -1, lr 0.1."""
    weight, first, second = 1.0, 0.0, 0.0
    for step, gradient in enumerate((0.5, -1.0), 1):
        gradient += coupled * weight
        weight *= 1 - 0.1 * decoupled
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        weight -= 0.1 * (first / (1 - 0.8**step)) / (math.sqrt(second / (1 - 0.9**step)) + 1e-3)
    return weight


def adagrad() -> float:
    weight, total = 1.0, 0.0
    for step, gradient in enumerate((0.5, -1.0)):
        total += gradient**2
        weight -= 0.1 / (1 + step * 0.5) * gradient / (math.sqrt(total) + 1e-10)
    return weight


def clipped() -> tuple[Any, Any]:
    a, b, unused = (mge.Parameter([0.0]) for _ in range(3))
    a.grad, b.grad = mge.tensor([3.0]), mge.tensor([4.0])
    norm = optimizer.clip_grad_norm([a, b, unused], max_norm=1.0, ord=2.0)
    return (norm, a.grad, b.grad), (5.0, [0.6], [0.8])


def clamped() -> tuple[Any, Any]:
    a = mge.Parameter([0.0, 0.0])
    a.grad = mge.tensor([-3.0, 4.0])
    optimizer.clip_grad_value(a, lower=-1, upper=2)
    return a.grad, [-1.0, 2.0]


def device_names() -> tuple[Any, Any]:
    before = mge.get_default_device()
    mge.set_default_device("cpu1")
    named = mge.get_default_device()
    mge.set_default_device(before)
    return (named, mge.tensor(1.0).device.type), ("cpu1", "cpu")


def of_sgd(params: Any) -> Any:
    return optimizer.SGD(params, lr=0.1, momentum=0.5, weight_decay=0.1)


SGD_BY_HAND = 1 - 0.1 * 0.6 - 0.1 * (0.5 * 0.6 + -1 + 0.1 * 0.94)
NESTEROV = 1 - 0.1 * (0.5 + 0.5 * 0.5)

CALLS: dict[str, Call] = {
    "amp.autocast": lambda: (in_region(), torch.float16),
    "amp.autocast in bfloat16": lambda: (in_region(low_prec_dtype="bfloat16", high_prec_dtype="float32"), torch.bfloat16),
    "amp.autocast switched off": lambda: (in_region(enabled=False), torch.float32),
    "amp.autocast as a decorator": lambda: (decorated(), torch.bfloat16),
    "amp.enabled": lambda: (switched(enabled=True), (torch.float16, torch.float32)),
    "amp.low_prec_dtype": lambda: (switched(enabled=True, low_prec_dtype="bfloat16"), (torch.bfloat16, torch.float32)),
    "amp.high_prec_dtype": lambda: (switched(enabled=True, high_prec_dtype="float16"), (torch.float16, torch.float16)),
    "amp.GradScaler": lambda: (scaled([1.0, 2.0])[1], [1.0, 2.0]),
    "amp.GradScaler in numbers": lambda: (amp.GradScaler().state_dict()["scale_factor"], 16.0),
    "amp.GradScaler.backward": seeded,
    "amp.GradScaler.backward into inf": lambda: (
        after(*scaled([float("inf")])), (None, 8.0),
    ),
    "amp.GradScaler.backward without update": lambda: (
        after(*scaled([float("nan")], update=False)), (None, 16.0),
    ),
    "amp.GradScaler.unscale": by_hand,
    "amp.GradScaler.update": moved,
    "amp.GradScaler.scale_factor": set_and_read("scale_factor", 64.0),
    "amp.GradScaler.growth_factor": set_and_read("growth_factor", 3.0),
    "amp.GradScaler.backoff_factor": set_and_read("backoff_factor", 0.25),
    "amp.GradScaler.growth_interval": set_and_read("growth_interval", 9),
    "amp.GradScaler.state_dict": loaded,
    "amp.GradScaler.load_state_dict": loaded,
    "amp.convert_tensor_format": nhwc_tensor,
    "amp.convert_module_format": nhwc_module,
    "autodiff.GradManager": lambda: (learned()[0].grad, [2.0, 2.0]),
    "autodiff.GradManager.attach": callbacks,
    "autodiff.GradManager.attached_tensors": attached,
    "autodiff.GradManager.record": recorded,
    "autodiff.GradManager.release": recorded,
    "autodiff.GradManager.backward": callbacks,
    "autodiff.GradManagerGroup": grouped,
    "autodiff.Function": own_backward,
    "optimizer.SGD": lambda: (stepped(of_sgd, 0.5, -1.0), SGD_BY_HAND),
    "optimizer.SGD nesterov": lambda: (
        stepped(lambda p: optimizer.SGD(p, 0.1, 0.5, nesterov=True), 0.5), NESTEROV,
    ),
    "optimizer.Adam": lambda: (
        stepped(lambda p: optimizer.Adam(p, 0.1, (0.8, 0.9), 1e-3, 0.1), 0.5, -1.0), adam(0.0, 0.1),
    ),
    "optimizer.AdamW": lambda: (
        stepped(lambda p: optimizer.AdamW(p, 0.1, (0.8, 0.9), 1e-3, 0.1), 0.5, -1.0), adam(0.1, 0.0),
    ),
    "optimizer.Adagrad": lambda: (stepped(lambda p: optimizer.Adagrad(p, 0.1, 0.5), 0.5, -1.0), adagrad()),
    "optimizer.Optimizer": lambda: (isinstance(of_sgd([mge.Parameter([1.0])]), optimizer.Optimizer), True),
    "optimizer.clip_grad_norm": clipped,
    "optimizer.clip_grad_value": clamped,
    "tensor": lambda: (mge.tensor([1.0, 2.0], dtype="float16", device="cpu0"), np.array([1, 2], np.float16)),
    "tensor of integers": lambda: (mge.tensor(np.arange(2)).dtype, torch.int32),
    "Tensor": lambda: (mge.Tensor([1, 2], dtype="float32"), np.array([1, 2], np.float32)),
    "Tensor of numpy": lambda: (isinstance(mge.Tensor(np.ones(2)), mge.Tensor), True),
    "Parameter": lambda: (mge.Parameter([1.0, 2.0]), np.array([1, 2], np.float32)),
    "Parameter of numpy": lambda: (mge.Parameter(np.ones((2, 2))), np.ones((2, 2), np.float32)),
    "Parameter of a tensor": lambda: (
        [isinstance(x, mge.Parameter) for x in (mge.Parameter(mge.tensor(1.0)), mge.tensor(1.0))], [True, False],
    ),
    "get_default_device": device_names,
    "set_default_device": device_names,
    "hub.load": lambda: (
        hub.load("megengine/models", "resnet18", num_classes=3, width=4)(F.ones((2, 3, 32, 32))).shape, (2, 3),
    ),
    "hub.list": lambda: (hub.list("megengine/models"), ["resnet18"]),
}  # fmt: skip
