"""Layers of torch.nn in a region: run without the mode where no rule concerns them, with weights that stay low.

Note [unruled layers]: a function mode costs about 1 us for each operator and attribute it lets through, and 5 us for a
function of torch.nn.functional. A layer of torch.nn whose forward calls nothing that the mode has a handler for runs
with the mode off. What it calls is read from its code and from that of the functions and methods it calls.

Note [kept weights]: torch.autocast casts the weights of linear layers and convolutions below Python, from a cache that
ends with the region and is keyed by the tensor alone. A bound layer whose forward is torch's own hands over the copies
that its training step keeps (`Copies`); the operator is the same, and so are its bits. Anything unusual goes torch's
way: a weight that is frozen, parametrised, swapped by functional_call or a tensor subclass, a nested region. Where a
rule concerns the operator its handler finds the copies.

Note [shared activations]: torch.autocast casts an fp32 activation once for each layer that reads it, and each keeps its
own low copy for the backward pass. A large one is cast once for layers that read it one after the other, and kept once.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled, nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from halfstep.cast.rules.dispatch import LOWS
from halfstep.cast.state import STATE

__all__ = ["low_forward", "unruled"]

ACTIVATIONS = frozenset({Tensor, FakeTensor})  # no subclass with a life of its own
MANY = 1 << 16  # elements of an activation from which one cast for several layers pays for the edges made in Python
LAYERS = frozenset(
    getattr(nn, name)
    for name in """AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d CELU Conv1d Conv2d Conv3d
    ConvTranspose1d ConvTranspose2d ConvTranspose3d Dropout Dropout1d Dropout2d Dropout3d ELU Flatten GELU GroupNorm
    Hardsigmoid Hardswish Hardtanh Identity LayerNorm LeakyReLU Linear LogSigmoid LogSoftmax MaxPool1d MaxPool2d
    MaxPool3d Mish PReLU RMSNorm ReLU ReLU6 SELU SiLU Sigmoid Softmax Softplus Tanh Unflatten""".split()
)
"""Classes whose forward, and what it calls, does arithmetic on tensors by name only: no ``+`` hides in them."""

SPACES = (F, torch, Tensor, torch._C._nn)

Forward = Callable[..., Any]


# ------------------------------------------------------------------ note [unruled layers]


def unruled(module: nn.Module, original: type[nn.Module], handlers: Mapping[Callable[..., Any], Any]) -> bool:
    """Return whether the forward of `module`, a layer of torch.nn of class `original`, calls nothing in `handlers`."""
    if original not in LAYERS or module._modules:  # children, parametrizations too, have rules of their own
        return False
    names = _names(original)  # type: ignore[arg-type]  # classes hash
    if isinstance(module, _ConvNd) and module.padding_mode == "zeros":
        names -= {"pad"}  # what the other modes call
    return not any(getattr(space, name) in handlers for name in names for space in SPACES if hasattr(space, name))


@cache
def _names(kind: type[nn.Module]) -> frozenset[str]:
    """Return every name that the forward of `kind` uses, and those of the functions and methods it calls."""
    names, seen, todo = set[str](), set[types.FunctionType](), list[Any]([kind.forward])
    while todo:
        function = todo.pop()
        if isinstance(function, types.FunctionType) and function not in seen:
            seen.add(function)
            if function.__module__ == "torch.overrides":  # how functions ask whether there is a mode
                continue
            names.update((function.__name__, *function.__code__.co_names))
            todo += _called(function, kind)
    return frozenset(names)


def _called(function: types.FunctionType, kind: type[nn.Module]) -> Iterator[Any]:
    for name in function.__code__.co_names:
        yield function.__globals__.get(name)
        yield getattr(kind, name, None)
        yield getattr(F, name, None)
    for cell in function.__closure__ or ():  # pooling chooses between two functions it holds
        yield cell.cell_contents


# ------------------------------------------------------------------ notes [kept weights], [shared activations]


def low_forward(original: type[nn.Module]) -> Forward | None:
    """Return the forward of a linear layer or a convolution that casts as little as it can; None for other classes."""
    if original.forward is nn.Linear.forward:
        return _low_forward(original.forward, _linear)
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if original.forward is kind.forward and getattr(original, "_conv_forward", None) is kind._conv_forward:
            return _low_forward(original.forward, kind._conv_forward)
    return None


def _linear(module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias)


def _low_forward(plain: Forward, run: Forward) -> Forward:
    def forward(module: nn.Module, input: Any) -> Any:
        copies = STATE.copies
        if copies is not None and id(module) not in copies.layers:
            copies = None
        shared = type(input) in ACTIVATIONS and input.dtype is torch.float32 and input.numel() >= MANY
        if copies is None and not shared:
            return plain(module, input)
        device = input.device.type if copies is None else copies.device
        if not (is_autocast_enabled(device) and is_autocast_cache_enabled()):
            return plain(module, input)
        dtype = get_autocast_dtype(device)
        if shared and dtype in LOWS and not peek_interpreter_stack():
            input = STATE.casts.cast_latest(input, dtype)
        if copies is None or copies.dtype is not dtype:
            return plain(module, input)
        parameters = module._parameters
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters or (low := copies.of(weight)) is None:
            return plain(module, input)
        bias: Tensor | None = parameters["bias"]
        if bias is not None and (low_bias := copies.of(bias)) is not None:
            bias = low_bias
        return run(module, input, low, bias)

    return forward
