"""Layers of torch.nn that take their low weights from the training step instead of having them cast.

torch.autocast casts the weights of linear layers and convolutions below Python, from a cache of its own that ends with
the region and is keyed by the tensor alone. A bound layer whose forward is torch's own hands over the copies that its
training step keeps (`Copies`); the operator is the same, and so are its bits. Anything unusual goes torch's way: a
weight that is frozen, parametrised, swapped by functional_call or of a tensor subclass, a nested region, a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled, nn
from torch.nn import functional as F

from halfstep.cast.copies import Copies
from halfstep.cast.state import STATE

__all__ = ["layer_forward"]

MANY = 1 << 16  # elements of an activation from which one cast for several layers pays for the edges made in Python

Forward = Callable[..., Any]


def _ready(name: str) -> Copies | None:
    """Return the copies to serve from, if the operator `name` is low here and now as the step's policy says."""
    state = STATE
    copies = state.copies
    if copies is None:
        return None
    recipe = copies.recipe
    if state.bound is not recipe or state.mode is not recipe.mode or name not in recipe.layers:
        return None
    device = copies.device
    if is_autocast_enabled(device) and get_autocast_dtype(device) is copies.dtype and is_autocast_cache_enabled():
        return copies
    return None


def layer_forward(original: type[nn.Module]) -> Forward | None:
    """Return the forward of a layer of class `original` that uses the step's copies; None: its forward is its own."""
    if original.forward is nn.Linear.forward:
        return _forward("linear", original.forward, _linear)
    for name, kind in (("conv1d", nn.Conv1d), ("conv2d", nn.Conv2d), ("conv3d", nn.Conv3d)):
        if original.forward is kind.forward and getattr(original, "_conv_forward", None) is kind._conv_forward:
            return _forward(name, original.forward, kind._conv_forward)
    return None


def _linear(module: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(input, weight, bias)


def _forward(name: str, plain: Forward, run: Forward) -> Forward:
    def forward(module: nn.Module, input: Any) -> Any:
        copies = _ready(name)
        if copies is None:
            return plain(module, input)
        parameters = module._parameters
        weight = parameters.get("weight")
        if weight is None or "bias" not in parameters or (low := copies.of(weight)) is None:
            return plain(module, input)
        bias = parameters["bias"]
        if bias is not None and (low_bias := copies.of(bias)) is not None:
            bias = low_bias
        if isinstance(input, Tensor) and input.dtype is torch.float32 and input.numel() >= MANY:
            input = STATE.casts.cast_latest(input, copies.dtype)
        return run(module, input, low, bias)

    return forward
